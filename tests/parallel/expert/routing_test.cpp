// The router's choices and losses, and the way of rows to experts and back,
// compared with formulas.
#include "echelon/parallel/expert/routing.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <cmath>

#include "tests/support/error_text.h"
#include "tests/support/parity.h"

namespace echelon::routing_test {

using testing::ElementsAre;
using torch::Tensor;

constexpr int64_t kTokens = 6;
constexpr int64_t kExperts = 4;

std::vector<int64_t> numbers_of(const Tensor& tensor) {
  const auto flat = tensor.contiguous().view(-1);
  return {
      flat.const_data_ptr<int64_t>(),
      flat.const_data_ptr<int64_t>() + flat.numel()};
}

TEST(Routing, OfEqualExpertsTheLowerNumberIsChosen) {
  const auto scores = torch::tensor(
      {{1.0, 2.0, 2.0, 1.0}, {0.0, 0.0, 0.0, 0.0}, {0.0, 3.0, 1.0, 3.0}},
      torch::kFloat64);
  const auto routing =
      route(scores, {.experts = 4, .per_token = 3}, /*samples=*/1, false);
  EXPECT_THAT(
      numbers_of(routing.experts), ElementsAre(1, 2, 0, 0, 1, 2, 1, 3, 2));
  EXPECT_TRUE(
      routing.weights.sum(1).allclose(torch::ones({3}, torch::kFloat64)));
  EXPECT_FALSE(routing.losses.defined());
  // Many equal ones, for which a sort might use another algorithm.
  const auto equal = torch::zeros({3, 100}, torch::kFloat64);
  const auto many = route(equal, {.experts = 100, .per_token = 2}, 1, false);
  EXPECT_THAT(numbers_of(many.experts), ElementsAre(0, 1, 0, 1, 0, 1));
}

TEST(Routing, WeightsAreSharesOfAllOrOfTheChosen) {
  const auto scores = parity::random({kTokens, kExperts}, 1);
  const auto shares = scores.softmax(-1);
  RoutingOptions options{.experts = kExperts, .per_token = 2};
  options.normalize = false;
  const auto plain = route(scores, options, 1, false);
  EXPECT_TRUE(plain.weights.equal(std::get<0>(shares.topk(2))));
  options.normalize = true;
  const auto normal = route(scores, options, 1, false);
  parity::detail::expect_close(
      "weights", plain.weights / plain.weights.sum(1, true), normal.weights, 1,
      1e-14);
}

// The losses of a sample are those that it has alone.
TEST(Routing, LossesAreOfEachSample) {
  const RoutingOptions options{
      .experts = kExperts, .per_token = 2, .aux_loss = 0.5, .z_loss = 0.25};
  const auto scores = parity::random({kTokens, kExperts}, 2);
  const auto losses = route(scores, options, 2, true).losses;
  ASSERT_EQ(losses.size(0), 2);
  for (int64_t sample = 0; sample < 2; ++sample) {
    const auto own = scores.narrow(0, sample * 3, 3);
    const auto alone = route(own, options, 1, true);
    EXPECT_DOUBLE_EQ(
        alone.losses.item<double>(), losses[sample].item<double>());
    const auto shares = own.softmax(-1);
    double expected = 0;
    for (int64_t e = 0; e < kExperts; ++e) {
      const double load = alone.experts.eq(e).sum().item<double>() / (2 * 3.0);
      expected +=
          0.5 * kExperts * load * shares.select(1, e).mean().item<double>();
    }
    for (int64_t token = 0; token < 3; ++token) {
      const double sum = std::log(own[token].exp().sum().item<double>());
      expected += 0.25 * sum * sum / 3;
    }
    EXPECT_NEAR(losses[sample].item<double>(), expected, 1e-12);
  }
  // Even load: the coefficient.
  const auto even = torch::eye(4, torch::kFloat64) * 1e-9;
  const auto balanced =
      route(even, {.experts = 4, .per_token = 1, .aux_loss = 0.5}, 1, true);
  EXPECT_NEAR(balanced.losses.item<double>(), 0.5, 1e-6);
}

// DeepSeek-V3's: by hand, with numbers of one digit.
TEST(Routing, TheBiasTakesPartInTheChoiceAlone) {
  // Sigmoids 0.2, 0.4, 0.6, 0.8.
  const auto shares = torch::tensor({{0.2, 0.4, 0.6, 0.8}}, torch::kFloat64);
  const auto scores = (shares / (1 - shares)).log();
  const auto bias = torch::tensor({0.7, 0.0, 0.0, -0.5}, torch::kFloat64);
  RoutingOptions options{
      .experts = 4, .per_token = 2, .sigmoid = true, .scale = 3};
  const auto plain = route(scores, options, 1, false);
  EXPECT_THAT(numbers_of(plain.experts), ElementsAre(3, 2));
  const auto moved = route(scores, options, 1, false, bias);
  EXPECT_THAT(numbers_of(moved.experts), ElementsAre(0, 2));
  const auto close = [](const Tensor& actual, const std::vector<double>& sums) {
    parity::detail::expect_close(
        "weights", torch::tensor(sums, torch::kFloat64).view({1, 2}), actual, 1,
        1e-14);
  };
  close(plain.weights, {3 * 0.8 / 1.4, 3 * 0.6 / 1.4});
  close(moved.weights, {3 * 0.2 / 0.8, 3 * 0.6 / 0.8});
  options.normalize = false;
  close(route(scores, options, 1, false, bias).weights, {3 * 0.2, 3 * 0.6});
  // The balance loss has sigmoids as shares of their sum.
  options.aux_loss = 1;
  EXPECT_NEAR(
      route(scores, options, 1, true).losses.item<double>(),
      4 / 2.0 * (0.8 + 0.6) / 2.0, 1e-12);
}

TEST(Routing, GroupsAreChosenByTheirTwoHighest) {
  const RoutingOptions options{
      .experts = 6,
      .per_token = 3,
      .sigmoid = true,
      .groups = 3,
      .groups_per_token = 2};
  // The highest expert is in the group with the lowest sum.
  const auto scores = torch::tensor(
      {{2.0, 2.0, 9.0, -9.0, 1.0, 1.5}, {0.0, 0.0, 0.0, 0.0, 0.0, 0.0}},
      torch::kFloat64);
  EXPECT_THAT(
      numbers_of(route(scores, options, 1, false).experts),
      ElementsAre(0, 1, 5, 0, 1, 2));
  const auto bias =
      torch::tensor({0.0, 0.0, 0.0, 5.0, 0.0, 0.0}, torch::kFloat64);
  EXPECT_THAT(
      numbers_of(
          route(scores.narrow(0, 0, 1), options, 1, false, bias).experts),
      ElementsAre(3, 2, 0));
}

TEST(Assignment, SpreadsAndCollectsAsTheFormula) {
  const auto scores = parity::random({kTokens, kExperts}, 3);
  const auto routing =
      route(scores, {.experts = kExperts, .per_token = 2}, 1, false);
  const Assignment assignment(routing.experts, kExperts);
  const auto x = parity::random({kTokens, 3}, 4).requires_grad_();
  const auto weights = routing.weights.detach().requires_grad_();
  const auto rows = assignment.spread(x);
  ASSERT_EQ(rows.size(0), 2 * kTokens);
  // Expert e computes e + 1 times its rows, and one more has none.
  std::vector<Tensor> results;
  int64_t begin = 0;
  for (int64_t e = 0; e < kExperts; ++e) {
    const int64_t count = assignment.counts().on_host()[static_cast<size_t>(e)];
    EXPECT_EQ(count, routing.experts.eq(e).sum().item<int64_t>());
    results.push_back(
        rows.narrow(0, begin, count) * static_cast<double>(e + 1));
    begin += count;
  }
  const auto y = assignment.collect(torch::cat(results), weights);
  const auto cotangent = parity::random({kTokens, 3}, 5);
  y.backward(cotangent);

  const auto plain_x = x.detach().requires_grad_();
  const auto plain_weights = weights.detach().requires_grad_();
  const auto factor =
      (plain_weights * (routing.experts + 1).to(torch::kFloat64)).sum(1, true);
  const auto expected = plain_x * factor;
  expected.backward(cotangent);
  const auto close = [](const char* what, const Tensor& a, const Tensor& b) {
    parity::detail::expect_close(what, a, b, 1, 1e-13);
  };
  close("y", expected.detach(), y.detach());
  close("gradient of x", plain_x.grad(), x.grad());
  close("gradient of weights", plain_weights.grad(), weights.grad());
  EXPECT_THAT(
      error_text<Error>([&] {
        torch::autograd::grad(
            {assignment.spread(x).sum()}, {x}, {}, std::nullopt,
            /*create_graph=*/true);
      }),
      testing::HasSubstr("cannot be differentiated again"));
}

TEST(Assignment, CapacityIsAShareOfASamplesMeanLoad) {
  const auto capacity_of = [](double factor) {
    return capacity_tokens(
        50, {.experts = 10, .per_token = 2, .capacity_factor = factor});
  };
  EXPECT_EQ(capacity_of(1), 10);
  EXPECT_EQ(capacity_of(1.1), 11);
  EXPECT_EQ(capacity_of(1.11), 12);
  EXPECT_EQ(capacity_of(0.01), 1);
}

// Two samples of four tokens; an expert takes two tokens of each.
TEST(Assignment, DropsWhatIsBeyondTheCapacityOfASample) {
  const auto experts = torch::tensor(
      {{1, 0}, {1, 2}, {2, 1}, {1, 2}, {2, 1}, {2, 0}, {2, 1}, {1, 2}});
  const Assignment assignment(experts, 3, Capacity{.samples = 2, .tokens = 2});
  EXPECT_THAT(numbers_of(assignment.loads()), ElementsAre(2, 7, 7));
  EXPECT_THAT(numbers_of(assignment.dropped()), ElementsAre(0, 3, 3));
  EXPECT_THAT(assignment.counts().on_host(), ElementsAre(2, 4, 4));
  const auto kept = torch::tensor(
      {{1, 1}, {1, 1}, {1, 0}, {0, 0}, {1, 1}, {1, 1}, {0, 1}, {0, 0}},
      torch::kFloat64);
  const auto x = parity::random({8, 3}, 6).requires_grad_();
  const auto weights = parity::random({8, 2}, 7).requires_grad_();
  const auto rows = assignment.spread(x);
  EXPECT_TRUE(rows.narrow(0, 2, 2).equal(x.narrow(0, 0, 2)));
  const auto scale =
      torch::tensor({1, 1, 2, 2, 2, 2, 3, 3, 3, 3}, torch::kFloat64);
  const auto y = assignment.collect(rows * scale.unsqueeze(1), weights);
  const auto cotangent = parity::random({8, 3}, 8);
  y.backward(cotangent);

  const auto plain_x = x.detach().requires_grad_();
  const auto plain_weights = weights.detach().requires_grad_();
  const auto factor =
      (plain_weights * kept * (experts + 1).to(torch::kFloat64)).sum(1, true);
  const auto expected = plain_x * factor;
  expected.backward(cotangent);
  const auto close = [](const char* what, const Tensor& a, const Tensor& b) {
    parity::detail::expect_close(what, a, b, 1, 1e-13);
  };
  close("y", expected.detach(), y.detach());
  close("gradient of x", plain_x.grad(), x.grad());
  close("gradient of weights", plain_weights.grad(), weights.grad());
  // Without samples there is nothing to drop.
  const Assignment none(
      experts.narrow(0, 0, 0), 3, Capacity{.samples = 0, .tokens = 2});
  EXPECT_THAT(none.counts().on_host(), ElementsAre(0, 0, 0));
}

}  // namespace echelon::routing_test
