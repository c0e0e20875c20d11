// CUDA's fused kernels on blocks of keys: their log-sum-exp and their backward
// with that of all blocks.
#include "tests/parallel/context/block_cases.h"
#include "tests/support/gpu.h"

namespace echelon::context_gpu_test {

class ContextGpu : public GpuTest {};

TEST_F(ContextGpu, MergedBlocksInFloat32) {
  expect_merged_blocks(test_gpu(), torch::kFloat32, 1e-5);
}

TEST_F(ContextGpu, MergedBlocksInHalf) {
  expect_merged_blocks(test_gpu(), torch::kHalf, 5e-3);
}

TEST_F(ContextGpu, MergedBlocksInBfloat16) {
  expect_merged_blocks(test_gpu(), torch::kBFloat16, 3e-2);
}

}  // namespace echelon::context_gpu_test
