// Recompute and offload on a GPU: the same bits as without, and less memory.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <c10/core/CachingDeviceAllocator.h>

#include "echelon/comm/nccl/nccl_backend.h"
#include "echelon/memory/activation_storage.h"
#include "echelon/memory/layer_memory.h"
#include "echelon/memory/recompute.h"
#include "tests/support/parity.h"

namespace echelon::memory_gpu_test {

using torch::Tensor;
using Tensors = std::vector<Tensor>;

const torch::Device kGpu("cuda:0");

class MemoryGpu : public testing::TestWithParam<torch::Dtype> {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "this machine has no GPU";
    load_accelerator(DeviceKind::cuda);
  }
};
INSTANTIATE_TEST_SUITE_P(
    Dtypes, MemoryGpu, testing::Values(torch::kFloat32, torch::kBFloat16),
    [](const auto& info) {
      return std::string(c10::getDtypeNames(info.param).first);
    });

struct Block {
  Block(uint64_t seed, torch::Dtype dtype)
      : qkv(leaf({kWidth, 3 * kWidth}, seed, dtype)),
        first(leaf({kWidth, 4 * kWidth}, seed + 1, dtype)),
        second(leaf({4 * kWidth, kWidth}, seed + 2, dtype)) {}

  static constexpr int64_t kWidth = 256;
  static Tensor leaf(at::IntArrayRef shape, uint64_t seed, torch::Dtype dtype) {
    return (parity::random(shape, seed) * 0.05)
        .to(kGpu, dtype)
        .requires_grad_();
  }
  LayerForward forward() const {
    return [*this](const Tensors& in) -> Tensors {
      const auto& x = in[0];  // [batch, sequence, width]
      const auto parts = torch::layer_norm(x, {kWidth})
                             .matmul(qkv)
                             .view({x.size(0), x.size(1), 3, 4, kWidth / 4})
                             .permute({2, 0, 3, 1, 4});
      const auto seen = at::scaled_dot_product_attention(
          parts[0], parts[1], parts[2], {}, /*dropout_p=*/0.1, true);
      const auto y = x + seen.transpose(1, 2).flatten(2);
      return {
          y + torch::dropout(
                  torch::gelu(torch::layer_norm(y, {kWidth}).matmul(first))
                      .matmul(second),
                  0.2, true)};
    };
  }
  Tensors parameters() const { return {qkv, first, second}; }

  Tensor qkv, first, second;
};

int64_t allocated() {
  auto* allocator = at::getDeviceAllocator(at::kCUDA);
  return allocator->getDeviceStats(0)
      .allocated_bytes[static_cast<size_t>(
          c10::CachingAllocator::StatType::AGGREGATE)]
      .current;
}

struct Outcome {
  Tensors tensors;
  int64_t kept = 0;
};

Outcome
run(const std::vector<Block>& blocks,
    const std::function<LayerForward(LayerForward)>& wrap) {
  torch::manual_seed(5);
  auto x = parity::random({8, 128, Block::kWidth}, 9)
               .to(kGpu, blocks[0].qkv.scalar_type())
               .requires_grad_();
  const int64_t before = allocated();
  Tensor y = x;
  for (const auto& block : blocks) y = wrap(block.forward())({y})[0];
  torch::cuda::synchronize();
  Outcome outcome{{y.detach().clone()}, allocated() - before};
  y.to(torch::kFloat32).square().sum().backward();
  outcome.tensors.push_back(x.grad());
  for (const auto& block : blocks) {
    for (auto& parameter : block.parameters()) {
      outcome.tensors.push_back(parameter.grad());
      parameter.mutable_grad().reset();
    }
  }
  return outcome;
}

void expect_same(const Outcome& expected, const Outcome& actual) {
  for (size_t i = 0; i < expected.tensors.size(); ++i) {
    EXPECT_TRUE(expected.tensors[i].equal(actual.tensors[i])) << i;
  }
}

// Kernels that add in any order would differ even without recompute.
class Deterministic {
 public:
  Deterministic() {
    at::globalContext().setDeterministicAlgorithms(true, true);
  }
  ~Deterministic() {
    at::globalContext().setDeterministicAlgorithms(false, false);
  }
};

TEST_P(MemoryGpu, SameBitsAndLessKept) {
  const Deterministic deterministic;
  std::vector<Block> blocks;
  for (uint64_t i = 0; i < 6; ++i) blocks.emplace_back(10 * i, GetParam());
  const auto plain = run(blocks, [](LayerForward f) { return f; });
  const auto offload = offload_to_host([&](const Tensor& tensor) {
    for (const auto& block : blocks) {
      for (const auto& parameter : block.parameters()) {
        if (tensor.storage().is_alias_of(parameter.storage())) return true;
      }
    }
    return false;
  });
  const auto all = [](LayerForward f) { return recomputed(std::move(f)); };
  const auto products = [](LayerForward f) {
    return recomputed(std::move(f), {.keep = matmul_operators()});
  };
  const auto outside = [&](LayerForward f) {
    return with_hooks(std::move(f), offload);
  };
  const auto both = [&](LayerForward f) { return outside(products(f)); };
  const auto inputs = [&](LayerForward f) { return outside(all(f)); };
  int64_t least = plain.kept;
  for (const auto& wrap :
       std::vector<std::function<LayerForward(LayerForward)>>{
           products, all, outside, both, inputs}) {
    const auto outcome = run(blocks, wrap);
    expect_same(plain, outcome);
    EXPECT_LT(outcome.kept, plain.kept * 3 / 4);
    least = std::min(least, outcome.kept);
  }
  EXPECT_LT(least, plain.kept / 4);
}

// The side stream and the current one alternate; nothing is read too early.
TEST_P(MemoryGpu, OffloadOfManySteps) {
  const Deterministic deterministic;
  std::vector<Block> blocks;
  for (uint64_t i = 0; i < 3; ++i) blocks.emplace_back(10 * i, GetParam());
  const auto plain = run(blocks, [](LayerForward f) { return f; });
  const auto offload = offload_to_host([](const Tensor&) { return false; }, 1);
  for (int step = 0; step < 20; ++step) {
    expect_same(plain, run(blocks, [&](LayerForward f) {
                  return with_hooks(std::move(f), offload);
                }));
  }
}

}  // namespace echelon::memory_gpu_test
