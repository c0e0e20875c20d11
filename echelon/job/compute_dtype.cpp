#include "echelon/job/compute_dtype.h"

#include <utility>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {

namespace {

std::string place_of(const Job& job) {
  const bool own = job.document.entries().empty();
  return (own ? describe(job) : job.document).where("precision.compute");
}

}  // namespace

void check_compute_on_processor(const Job& job) {
  const bool tf32 = job.precision.compute == ComputeDtype::tf32;
  if (!tf32 && job.precision.compute != ComputeDtype::fp8) return;
  throw ConfigError(
      place_of(job) +
      ": is for the matrix units of GPUs, and the ranks are on CPUs; set " +
      (tf32 ? "compute = \"same\", whose products are float32, or \"bf16\""
            : "compute = \"bf16\", which fp8 is but for those products"));
}

void check_compute_on_gpu(const Job& job, int capability) {
  constexpr int kFirstWithFp8 = 89;  // Ada
  if (job.precision.compute != ComputeDtype::fp8) return;
  if (capability == 0 || capability >= kFirstWithFp8) return;
  throw ConfigError(format(
      "{}: needs a GPU of compute capability 8.9 or newer, and this one has "
      "{}.{}; set compute = \"bf16\"",
      place_of(job), capability / 10, capability % 10));
}

Job with_compute_dtype(Job job, bool gpus_with_bf16) {
  if (job.precision.compute != ComputeDtype::automatic) return job;
  const bool allowed =
      job.model.dtype == ModelDtype::float32 && job.model.name != kOwnModel &&
      job.model.devices.empty() && job.train.compress == Compression::none;
  job.precision.compute =
      gpus_with_bf16 && allowed ? ComputeDtype::bf16 : ComputeDtype::same;
  return job;
}

Job with_compute_dtype(Job job, const cluster::Device& device) {
  if (device.processor) check_compute_on_processor(job);
  return with_compute_dtype(
      std::move(job),
      !device.processor && device.peak(cluster::Precision::bf16) > 0);
}

}  // namespace echelon
