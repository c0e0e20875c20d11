// The products of experts, compared with a linear layer for each.
#include "echelon/parallel/expert/grouped_linear.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "tests/support/parity.h"

namespace echelon::grouped_linear_test {

using torch::Tensor;
using torch::autograd::grad;

constexpr int64_t kIn = 8;
constexpr int64_t kOut = 16;
const std::vector<int64_t> kCounts = {3, 0, 5, 1};  // one expert has no rows

// Slices of one tensor, with something between them, or tensors of their own.
std::vector<Tensor> weights_of(bool in_one_tensor) {
  const auto all = parity::random({4, kOut + 2, kIn}, 1).narrow(1, 0, kOut);
  std::vector<Tensor> weights;
  for (int64_t i = 0; i < 4; ++i) {
    const auto own = all[i].detach();
    weights.push_back(
        (in_one_tensor ? own : own.clone()).set_requires_grad(true));
  }
  return weights;
}

Tensor one_by_one(
    const Tensor& rows, const std::vector<int64_t>& counts,
    const std::vector<Tensor>& weights) {
  std::vector<Tensor> results;
  const auto parts = rows.split_with_sizes(counts);
  for (size_t i = 0; i < weights.size(); ++i) {
    results.push_back(at::linear(parts[i], weights[i]));
  }
  return torch::cat(results);
}

void expect_near(const Tensor& actual, const Tensor& expected) {
  EXPECT_TRUE(torch::allclose(actual, expected, 1e-13, 1e-13));
}

TEST(GroupedLinear, IsALinearLayerForEachExpert) {
  for (const bool in_one_tensor : {true, false}) {
    for (const auto& counts : {kCounts, {0, 0, 0, 0}, {0, 0, 0, 9}}) {
      const auto weights = weights_of(in_one_tensor);
      int64_t total = 0;
      for (const int64_t count : counts) total += count;
      const auto rows = parity::random({total, kIn}, 2).requires_grad_();
      const auto cotangent = parity::random({total, kOut}, 3);
      std::vector<Tensor> inputs = weights;
      inputs.push_back(rows);
      const auto expected = one_by_one(rows, counts, weights);
      const auto found = grouped_linear(rows, RowCounts(counts), weights, 0.5);
      expect_near(found, expected);
      const auto exact = grad({expected}, inputs, {cotangent});
      const auto gradients = grad({found}, inputs, {cotangent});
      for (size_t i = 0; i < 4; ++i) expect_near(gradients[i], exact[i] * 0.5);
      expect_near(gradients[4], exact[4]);
      EXPECT_TRUE(gradients[0].is_alias_of(gradients[3]));
    }
  }
}

TEST(RowCounts, AreTheSameFromTheHostAndFromADevice) {
  const RowCounts host(kCounts), device(torch::tensor(kCounts, torch::kInt64));
  EXPECT_EQ(device.on_host(), kCounts);
  EXPECT_EQ(host.on_host(), kCounts);
  EXPECT_TRUE(host.on(torch::kCPU).equal(device.on(torch::kCPU)));
  const auto ends = torch::tensor({3, 3, 8, 9}, torch::kInt32);
  EXPECT_TRUE(host.ends_on(torch::kCPU).equal(ends));
  EXPECT_TRUE(device.ends_on(torch::kCPU).equal(ends));
}

TEST(GroupedLinear, OfFrozenWeightsOnlyRowsHaveAGradient) {
  auto weights = weights_of(true);
  for (auto& weight : weights) weight.set_requires_grad(false);
  const auto rows = parity::random({9, kIn}, 2).requires_grad_();
  const auto cotangent = parity::random({9, kOut}, 3);
  expect_near(
      grad(
          {grouped_linear(rows, RowCounts(kCounts), weights, 1)}, {rows},
          {cotangent})[0],
      grad({one_by_one(rows, kCounts, weights)}, {rows}, {cotangent})[0]);
}

TEST(GroupedLinear, CanBeDifferentiatedTwice) {
  const auto weights = weights_of(true);
  const auto rows = parity::random({9, kIn}, 2).requires_grad_();
  const auto twice = [&](const Tensor& y) {
    const auto first = grad(
        {(y * y).sum()}, {rows, weights[2]}, {}, std::nullopt,
        /*create_graph=*/true);
    return grad(
        {first[0].pow(2).sum() + first[1].pow(2).sum()},
        {rows, weights[0], weights[2]});
  };
  const auto found =
      twice(grouped_linear(rows, RowCounts(kCounts), weights, 1));
  const auto expected = twice(one_by_one(rows, kCounts, weights));
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_TRUE(torch::allclose(found[i], expected[i], 1e-11, 1e-11)) << i;
  }
}

TEST(GroupedLinear, TensorsAtEvenDistancesAreOneTensor) {
  const auto weights = weights_of(true);
  const auto all = detail::stacked_in_memory(weights);
  ASSERT_TRUE(all.defined());
  EXPECT_TRUE(all.equal(torch::stack(weights)));
  EXPECT_EQ(all.data_ptr(), weights[0].data_ptr());
  EXPECT_TRUE(detail::stacked_in_memory({weights[2]}).defined());
  EXPECT_FALSE(detail::stacked_in_memory(weights_of(false)).defined());
  EXPECT_FALSE(detail::stacked_in_memory({weights[1], weights[0]}).defined());
  EXPECT_FALSE(detail::stacked_in_memory({weights[0], weights[1], weights[3]})
                   .defined());
}

// LibTorch computes the call that a GPU has a kernel for by a loop on a CPU.
TEST(GroupedLinear, OneCallComputesTheSame) {
  const auto weights = weights_of(true);
  const auto all = detail::stacked_in_memory(weights).to(torch::kBFloat16);
  const RowCounts counts(torch::tensor(kCounts, torch::kInt64));
  const auto low = [](const Tensor& x) { return x.to(torch::kBFloat16); };
  const auto rows = parity::random({9, kIn}, 2);
  const auto cotangent = parity::random({9, kOut}, 3);
  const auto rounded = [](const Tensor& actual, const Tensor& expected) {
    EXPECT_TRUE(
        torch::allclose(actual.to(torch::kFloat64), expected, 0.03, 0.03))
        << (actual.to(torch::kFloat64) - expected).abs().max();
  };
  rounded(
      detail::grouped_product(low(rows), counts, all),
      one_by_one(rows, kCounts, weights));
  const auto leaf = rows.detach().requires_grad_();
  std::vector<Tensor> inputs = weights;
  inputs.push_back(leaf);
  const auto exact =
      grad({one_by_one(leaf, kCounts, weights)}, inputs, {cotangent});
  rounded(
      detail::grouped_product(low(cotangent), counts, all.transpose(1, 2)),
      exact[4]);
  rounded(
      detail::grouped_gradient(low(rows), counts, low(cotangent)),
      torch::stack({exact[0], exact[1], exact[2], exact[3]}));
}

}  // namespace echelon::grouped_linear_test
