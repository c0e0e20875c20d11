// Where a test with label gpu runs.
#pragma once

#include <gtest/gtest.h>
#include <torch/types.h>

#include <cstdlib>
#include <string>

#include "echelon/comm/nccl/accelerator.h"

namespace echelon {

/// The first GPU; ECHELON_TEST_DEVICE=cpu tries the tests themselves on a
/// machine that has none.
inline torch::Device test_gpu() {
  const char* other = std::getenv("ECHELON_TEST_DEVICE");
  return torch::Device(other != nullptr ? other : "cuda:0");
}

/// Skips the tests of a machine without a GPU; else CUDA's kernels are loaded,
/// and the calling thread's device is test_gpu().
class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!test_gpu().is_cuda()) return;
    if (cuda_device_count() == 0) GTEST_SKIP() << "this machine has no GPU";
    load_accelerator(DeviceKind::cuda);
    set_current_device(test_gpu());
  }
};

}  // namespace echelon
