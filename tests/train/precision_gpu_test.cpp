// [precision] compute = "auto" and "tf32" on a GPU.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>

#include "echelon/cluster/cuda_driver.h"
#include "echelon/train/chosen_precision.h"
#include "tests/support/gpu.h"

namespace echelon::precision_gpu_test {

using torch::Tensor;

class PrecisionGpu : public GpuTest {};

TEST_F(PrecisionGpu, ProductsOfFloat32RoundToTf32WhereAJobSaysSo) {
  if (!test_gpu().is_cuda()) GTEST_SKIP() << "TF32 is for GPUs";
  World world = World::alone({.device = DeviceKind::cuda});
  torch::manual_seed(1);
  const auto a = torch::randn({256, 512}), b = torch::randn({512, 128});
  const auto exact = a.to(torch::kFloat64).mm(b.to(torch::kFloat64));
  const auto error_in = [&](ComputeDtype compute) {
    Job job;
    job.precision.compute = compute;
    EXPECT_EQ(chosen_precision(job, world).compute, compute);
    const Tensor found = a.to(world.device()).mm(b.to(world.device())).cpu();
    EXPECT_EQ(found.scalar_type(), torch::kFloat32);
    return ((found.to(torch::kFloat64) - exact).norm() / exact.norm())
        .item<double>();
  };
  EXPECT_LT(error_in(ComputeDtype::same), 1e-6);
  const double rounded = error_in(ComputeDtype::tf32);
  EXPECT_LT(rounded, 2e-3);
  if (cluster::has_bf16(cluster::ask_cuda())) {  // it has TF32 too
    EXPECT_GT(rounded, 1e-5);
  }
  EXPECT_LT(error_in(ComputeDtype::same), 1e-6);
}

TEST_F(PrecisionGpu, IsBf16ByDefaultWhereTheGpuHasIt) {
  const bool gpu = test_gpu().is_cuda();
  World world =
      World::alone({.device = gpu ? DeviceKind::cuda : DeviceKind::cpu});
  const bool low = gpu && cluster::has_bf16(cluster::ask_cuda());
  Job job;
  EXPECT_EQ(
      chosen_precision(job, world).compute,
      low ? ComputeDtype::bf16 : ComputeDtype::same);
  job.model.dtype = ModelDtype::float64;
  EXPECT_EQ(chosen_precision(job, world).compute, ComputeDtype::same);
}

}  // namespace echelon::precision_gpu_test
