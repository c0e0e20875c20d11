#include "echelon/train/chosen_precision.h"

#include <ATen/Context.h>

#include <algorithm>
#include <cstdio>

#include "echelon/cluster/cuda_driver.h"
#include "echelon/error.h"
#include "echelon/job/compute_dtype.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

// GPUs from compute capability 9.0 on multiply in 8 bits; other devices are
// those of tests.
void check_fp8(const Job& job, World& world) {
  const int capability = cluster::ask_cuda().capability;
  const bool here = !world.device().is_cuda() || capability >= 9;
  const auto everywhere = world.exchange(here ? "fp8" : "");
  if (std::ranges::count(everywhere, "fp8") == world.size()) return;
  const bool own = job.document.entries().empty();
  throw ConfigError(
      (own ? describe(job) : job.document).where("precision.compute") +
      ": needs GPUs of compute capability 9.0 (H100) or newer, and " +
      (here ? "those of other ranks are older"
            : format("this rank's has {}", capability)) +
      "; set compute = \"bf16\"");
}

}  // namespace

PrecisionOptions chosen_precision(const Job& job, World& world) {
  const torch::Device device = world.device();
  if (device.is_cpu()) {
    check_compute_on_processor(job);
    return with_compute_dtype(job, false).precision;
  }
  const bool tf32 = job.precision.compute == ComputeDtype::tf32;
  at::globalContext().setAllowTF32CuBLAS(tf32);
  if (tf32) at::globalContext().setAllowTF32CuDNN(true);
  if (job.precision.compute == ComputeDtype::fp8) check_fp8(job, world);
  if (job.precision.compute != ComputeDtype::automatic) return job.precision;
  const bool here = device.is_cuda() && cluster::has_bf16(cluster::ask_cuda());
  const auto everywhere = world.exchange(here ? "bf16" : "");
  const auto chosen =
      with_compute_dtype(
          job, std::ranges::count(everywhere, "bf16") == world.size())
          .precision;
  if (world.rank() == 0 && chosen.compute == ComputeDtype::bf16) {
    std::puts(
        "precision: bf16, master parameters float32; [precision] compute = "
        "\"same\" computes in float32");
    std::fflush(stdout);
  }
  return chosen;
}

}  // namespace echelon
