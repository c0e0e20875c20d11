// Samples of which ranks have parts: losses and dropped choices are those of
// whole samples.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>

#include "echelon/comm/world.h"
#include "echelon/parallel/expert/routing.h"
#include "tests/support/parity.h"

namespace echelon::sample_parts_test {

using torch::Tensor;

constexpr int64_t kSamples = 3;
constexpr int64_t kLength = 11;

using Pieces = std::vector<std::vector<IndexRange>>;

// Three ranks: one piece each, in order and not; and two each, some of them
// empty, of which later ranks have the earlier tokens of the second half.
const Pieces kCuts[] = {
    {{{0, 4}}, {{4, 5}}, {{5, 11}}},
    {{{7, 11}}, {{0, 2}}, {{2, 7}}},
    {{{0, 2}, {10, 11}}, {{2, 4}, {8, 10}}, {{4, 6}, {6, 8}}},
    {{{0, 6}, {11, 11}}, {{6, 6}, {8, 11}}, {{6, 7}, {7, 8}}}};

// The tokens of the pieces of all samples in x [samples * length, …].
Tensor tokens_at(const Tensor& x, const std::vector<IndexRange>& pieces) {
  const auto samples = x.view({kSamples, kLength, -1});
  std::vector<Tensor> rows;
  for (const auto& piece : pieces) {
    rows.push_back(samples.narrow(1, piece.begin, piece.size()));
  }
  return at::cat(rows, 1).flatten(0, 1);
}

TEST(SampleParts, LossesAndDropsAreThoseOfWholeSamples) {
  RoutingOptions options{
      .experts = 4,
      .per_token = 2,
      .aux_loss = 0.5,
      .z_loss = 0.25,
      .capacity_factor = 0.5};
  const auto values =
      parity::random({kSamples * kLength, options.experts}, 1) * 2;
  const auto route_all = [&](const Tensor& scores, const SampleParts& parts) {
    return route(scores, options, kSamples, true, {}, parts, "mlp");
  };
  // Marks what an expert takes of the tokens.
  const auto taken_of = [&](const Routing& routing, const SampleParts& parts) {
    const Assignment assignment(
        routing.experts, options.experts,
        Capacity{
            .samples = kSamples,
            .tokens = capacity_tokens(kLength, options),
            .parts = parts,
            .earlier = routing.earlier});
    const auto ones =
        torch::ones({routing.experts.size(0), 1}, torch::kFloat64);
    std::vector<Tensor> choices;
    for (int64_t i = 0; i < options.per_token; ++i) {
      auto weights = torch::zeros(routing.experts.sizes(), torch::kFloat64);
      weights.select(1, i).fill_(1);
      choices.push_back(assignment.collect(assignment.spread(ones), weights));
    }
    return at::cat(choices, 1);
  };
  const auto whole_scores = values.clone().requires_grad_();
  const auto whole = route_all(whole_scores, {});
  const auto factors = torch::tensor({1.0, 2.0, 3.0}, torch::kFloat64);
  (whole.losses * factors).sum().backward();
  const auto taken = taken_of(whole, {});
  ASSERT_LT(taken.sum().item<double>(), taken.numel());

  for (const auto& pieces : kCuts) {
    run_ranks(3, [&](World& world) {
      const SampleParts parts{.group = world.group(), .pieces = pieces};
      const auto scores = tokens_at(values, parts.here()).requires_grad_();
      const auto routing = route_all(scores, parts);
      auto losses = routing.losses.detach().clone();
      parts.group.all_reduce(losses).wait();
      parity::detail::expect_close(
          "losses", whole.losses.detach(), losses, 1, 1e-13);
      (routing.losses * factors).sum().backward();
      parity::detail::expect_close(
          "gradient", tokens_at(whole_scores.grad(), parts.here()),
          scores.grad(), 1, 1e-13);
      EXPECT_TRUE(
          taken_of(routing, parts).equal(tokens_at(taken, parts.here())));
    });
  }
}

}  // namespace echelon::sample_parts_test
