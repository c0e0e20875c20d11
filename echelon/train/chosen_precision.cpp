#include "echelon/train/chosen_precision.h"

#include <ATen/Context.h>

#include <algorithm>
#include <cstdio>

#include "echelon/cluster/cuda_driver.h"
#include "echelon/job/compute_dtype.h"

namespace echelon {

PrecisionOptions chosen_precision(const Job& job, World& world) {
  const torch::Device device = world.device();
  if (device.is_cpu()) {
    check_compute_on_processor(job);
    return with_compute_dtype(job, false).precision;
  }
  const bool tf32 = job.precision.compute == ComputeDtype::tf32;
  at::globalContext().setAllowTF32CuBLAS(tf32);
  if (tf32) at::globalContext().setAllowTF32CuDNN(true);
  if (device.is_cuda()) {
    check_compute_on_gpu(job, cluster::ask_cuda().capability);
  }
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
