#include "echelon/memory/activation_storage.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <thread>
#include <vector>

#include "tests/memory/live_bytes.h"
#include "tests/support/parity.h"

namespace echelon::activation_storage_test {

using torch::Tensor;
using Tensors = std::vector<Tensor>;

bool no_parameters(const Tensor&) {
  return false;
}

auto storage_of(const Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

TEST(Offload, ComesBackBitForBit) {
  const auto hooks = offload_to_host(no_parameters, 1);
  const auto base = parity::random({6, 8}, 1).to(torch::kFloat32);
  for (const auto& tensor :
       {base, base.t(), base.narrow(1, 2, 3), base[3], base.to(torch::kHalf),
        base > 0, (base * 100).to(torch::kInt64)}) {
    const auto back = hooks->pack(tensor.detach());
    ASSERT_TRUE(back);
    const auto result = back();
    EXPECT_TRUE(result.equal(tensor));
    EXPECT_EQ(result.strides(), tensor.strides());
    EXPECT_EQ(result.scalar_type(), tensor.scalar_type());
    EXPECT_NE(storage_of(result), storage_of(tensor));
  }
}

TEST(Offload, SmallTensorsAndParametersStay) {
  const auto parameter = parity::random({100}, 1);
  const auto hooks = offload_to_host(
      [&](const Tensor& tensor) {
        return storage_of(tensor) == storage_of(parameter);
      },
      800);
  EXPECT_FALSE(hooks->pack(parameter));
  EXPECT_FALSE(hooks->pack(parameter.view({10, 10}).t()));
  EXPECT_FALSE(hooks->pack(parity::random({99}, 2)));
  EXPECT_TRUE(hooks->pack(parity::random({100}, 2)));
  EXPECT_FALSE(hooks->pack(torch::empty({100, 100}, torch::kMeta)));
}

TEST(Offload, AStorageIsCopiedOnce) {
  const auto hooks = offload_to_host(no_parameters, 1);
  const int64_t bytes = 1 << 20;
  const LiveBytes live;
  auto x = torch::ones({bytes}, torch::kByte);
  auto whole = hooks->pack(x);
  auto part = hooks->pack(x.narrow(0, 5, 100));
  EXPECT_EQ(live.now(), 2 * bytes) << "one copy of one storage";
  x.add_(1);
  auto changed = hooks->pack(x);
  EXPECT_EQ(live.now(), 3 * bytes) << "another version is another value";
  x = Tensor();
  EXPECT_EQ(live.now(), 2 * bytes);
  {
    const auto a = whole();
    EXPECT_EQ(live.now(), 3 * bytes);
    const auto b = part();
    EXPECT_EQ(storage_of(a), storage_of(b)) << "and brought back once";
    EXPECT_EQ(b.storage_offset(), 5);
    EXPECT_EQ(a[0].item<int>(), 1);
    EXPECT_EQ(changed()[0].item<int>(), 2);
  }
  whole = part = changed = nullptr;
  EXPECT_EQ(live.now(), 0);
}

// Only the tensor saved before the one that was asked for is prefetched.
TEST(Offload, ThePreviousTensorIsPrefetched) {
  const auto hooks = offload_to_host(no_parameters, 1);
  const int64_t bytes = 1 << 20;
  std::vector<std::function<Tensor()>> saved;
  const LiveBytes live;
  for (int i = 0; i < 3; ++i) {
    saved.push_back(hooks->pack(torch::full({bytes}, i, torch::kByte)));
  }
  ASSERT_EQ(live.now(), 3 * bytes);
  auto last = saved[2]();
  EXPECT_EQ(live.now(), 5 * bytes) << "the last, and the one before";
  last = Tensor();
  saved[2] = nullptr;
  EXPECT_EQ(live.now(), 3 * bytes);
  saved[1] = nullptr;  // never asked for
  EXPECT_EQ(live.now(), bytes);
  EXPECT_EQ(saved[0]()[0].item<int>(), 0);
}

TEST(Offload, RetainedGraphsAskAgain) {
  const auto hooks = offload_to_host(no_parameters, 1);
  const int64_t bytes = 1 << 20;
  const LiveBytes live;
  const auto saved = hooks->pack(torch::ones({bytes}, torch::kByte));
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(saved()[7].item<int>(), 1);
    EXPECT_EQ(live.now(), bytes) << "on the host alone";
  }
}

Tensors gradients(
    const std::shared_ptr<SavedTensorHooks>& hooks, const Tensor& weight) {
  const auto x = parity::random({40, 32}, 2).requires_grad_();
  LayerForward forward = [&](const Tensors& in) -> Tensors {
    const auto y = in[0].matmul(weight);
    return {torch::softmax(torch::gelu(y) * torch::tanh(y), -1)};
  };
  if (hooks) forward = with_hooks(forward, hooks);
  forward(forward({x}))[0].square().sum().backward();
  Tensors result = {x.grad(), weight.grad().clone()};
  weight.mutable_grad().reset();
  return result;
}

TEST(Offload, GradientsAreTheSame) {
  const auto weight = parity::random({32, 32}, 1).requires_grad_();
  const auto expected = gradients(nullptr, weight);
  const auto hooks = offload_to_host(
      [&](const Tensor& t) { return storage_of(t) == storage_of(weight); }, 1);
  const auto actual = gradients(hooks, weight);
  EXPECT_TRUE(expected[0].equal(actual[0]));
  EXPECT_TRUE(expected[1].equal(actual[1]));
  std::vector<std::thread> threads;  // ranks of one process share nothing
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      const auto own = weight.detach().clone().requires_grad_();
      EXPECT_TRUE(expected[1].equal(gradients(hooks, own)[1]));
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(Bf16, KeepsHalfOrAQuarterAndRounds) {
  const auto hooks = keep_in_bf16(no_parameters, 1);
  const auto x = parity::random({1 << 16}, 1);
  for (const auto dtype : {torch::kFloat32, torch::kFloat64}) {
    auto saved = x.to(dtype, false, true);
    const auto rounded = saved.to(torch::kBFloat16).to(dtype);
    const LiveBytes live;
    const auto back = hooks->pack(saved.view({256, 256}).t());
    EXPECT_EQ(live.now(), 2 << 16);
    EXPECT_TRUE(back().equal(rounded.view({256, 256}).t()));
    EXPECT_EQ(back().scalar_type(), dtype);
  }
  EXPECT_FALSE(hooks->pack(torch::ones({1 << 16}, torch::kInt64)));
  EXPECT_FALSE(hooks->pack(torch::ones({1 << 16}, torch::kHalf)));
}

TEST(Bf16, GradientsAreNear) {
  const auto weight = parity::random({32, 32}, 1).requires_grad_();
  const auto expected = gradients(nullptr, weight);
  const auto actual = gradients(keep_in_bf16(no_parameters, 1), weight);
  EXPECT_FALSE(expected[1].equal(actual[1]));
  EXPECT_LT(
      (expected[1] - actual[1]).norm().item<double>(),
      0.02 * expected[1].norm().item<double>());
}

}  // namespace echelon::activation_storage_test
