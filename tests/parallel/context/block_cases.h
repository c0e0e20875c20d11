// Attention to blocks of keys, merged, against the formula over all keys in
// float64.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "echelon/parallel/context/block_attention.h"
#include "tests/support/parity.h"

namespace echelon {

/// The queries of the second half of 70 tokens attend to the first half, and to
/// themselves in causal order. Two heads of queries share one of keys.
inline void expect_merged_blocks(
    torch::Device device, torch::Dtype dtype, double tolerance) {
  using torch::Tensor;
  constexpr int64_t kTokens = 70, kHalf = kTokens / 2, kSize = 16;
  const ContextAttentionCall call{
      .sequence = kTokens, .kv_of_query = {0, 0, 1, 1}};
  const auto leaf = [&](int64_t heads, int64_t tokens, uint64_t seed) {
    const auto here =
        parity::random({2, heads, tokens, kSize}, seed).to(device, dtype);
    return std::pair{
        here, here.cpu().to(torch::kFloat64).detach().requires_grad_()};
  };
  const auto [q, exact_q] = leaf(4, kHalf, 1);
  const auto [k, exact_k] = leaf(2, kTokens, 2);
  const auto [v, exact_v] = leaf(2, kTokens, 3);
  const auto [up, exact_up] = leaf(4, kHalf, 4);

  const auto of_kv = [](const Tensor& x) { return x.repeat_interleave(2, 1); };
  const auto scores = torch::matmul(exact_q, of_kv(exact_k).transpose(2, 3)) /
                      std::sqrt(static_cast<double>(kSize));
  const auto hidden =
      torch::ones({kHalf, kTokens}, torch::kBool).triu(kHalf + 1);
  const auto exact = torch::matmul(
      scores.masked_fill(hidden, -std::numeric_limits<double>::infinity())
          .softmax(-1),
      of_kv(exact_v));
  exact.backward(exact_up.detach());

  const detail::BlockAttention attention(call, 2, q.transpose(1, 2));
  const IndexRange rows{0, kHalf};
  const std::vector<detail::ScoreBlock> blocks = {
      {.rows = rows, .columns = {0, kHalf}},
      {.rows = rows, .columns = {kHalf, kTokens}, .causal = true}};
  detail::MergedAttention merged(kHalf);
  for (const auto& block : blocks) {
    merged.add(rows, attention.forward(q, k, v, block));
  }
  const auto out = merged.out();
  parity::detail::expect_close("out", exact, out.cpu(), 1e-2, tolerance);

  detail::BlockAttention::Saved saved{
      .gradient = up, .query = q, .out = out.to(dtype), .lse = merged.lse()};
  if (!attention.fused()) saved.delta = (up * out).sum(-1);
  Tensor for_q = torch::zeros_like(exact_q);
  const Tensor for_k = torch::zeros_like(exact_k);
  const Tensor for_v = torch::zeros_like(exact_v);
  for (const auto& block : blocks) {
    const auto part = attention.backward(saved, k, v, block);
    const auto add = [&](const Tensor& sum, const Tensor& to_add) {
      sum.narrow(2, block.columns.begin, block.columns.size())
          .add_(to_add.cpu().to(torch::kFloat64));
    };
    for_q = for_q + part.query.cpu().to(torch::kFloat64);
    add(for_k, part.key);
    add(for_v, part.value);
  }
  parity::detail::expect_close("query", exact_q.grad(), for_q, 1e-2, tolerance);
  parity::detail::expect_close("key", exact_k.grad(), for_k, 1e-2, tolerance);
  parity::detail::expect_close("value", exact_v.grad(), for_v, 1e-2, tolerance);
}

}  // namespace echelon
