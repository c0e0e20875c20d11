// Loss-free balancing, by hand: biases of experts follow the load of all ranks.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "echelon/comm/world.h"
#include "echelon/memory/recompute.h"
#include "echelon/models/mixture.h"

namespace echelon::bias_balance_test {

using torch::Tensor;

LanguageModelShape shape_of(double rate) {
  LanguageModelShape shape;
  for (const auto& kind : architectures()) {
    if (kind.biased_router) shape.kind = &kind;
  }
  shape.hidden_size = 3;
  shape.experts = 4;
  shape.bias_rate = rate;
  return shape;
}

std::shared_ptr<models::Router>
router_of(double rate, const std::string& mixture = "model.layers.0.mlp") {
  return std::make_shared<models::Router>(shape_of(rate), mixture);
}

void count(models::Router& router, const Tensor& experts) {
  router.count(loads_of(experts, 4));
}

TEST(BiasBalance, BiasesFollowTheLoadOfAllRanks) {
  run_ranks(2, [](World& world) {
    const auto router = router_of(0.25);
    models::RouterSteps steps(
        {router}, std::nullopt, world.group(), torch::kCPU);
    // Together 3, 1, 2 and 0 tokens, 1.5 on average. On the first rank alone
    // expert 1 would be above it.
    count(
        *router,
        world.rank() == 0 ? torch::tensor({{0, 1}}) : torch::tensor({{0, 2}}));
    count(
        *router,
        world.rank() == 0 ? torch::tensor({{0}}) : torch::tensor({{2}}));
    steps.finish();
    const auto once = torch::tensor({-0.25, 0.25, -0.25, 0.25});
    EXPECT_TRUE(router->bias.equal(once)) << router->bias;
    // Counts begin anew. A rank may have no token.
    if (world.rank() == 1) count(*router, torch::tensor({{3, 1}}));
    steps.finish();
    const auto twice = once + torch::tensor({0.25, -0.25, 0.25, -0.25});
    EXPECT_TRUE(router->bias.equal(twice)) << router->bias;
    // An even load moves nothing.
    count(*router, torch::tensor({{0, 1, 2, 3}}));
    steps.finish();
    EXPECT_TRUE(router->bias.equal(twice)) << router->bias;
  });
}

TEST(BiasBalance, OnlyForwardPassesOfTrainingCount) {
  const auto router = router_of(0.25);
  const auto experts = torch::tensor({{0, 0, 1}});
  {
    const torch::NoGradGuard no_grad;
    count(*router, experts);
  }
  router->eval();
  count(*router, experts);
  EXPECT_FALSE(router->loads.defined());
  router->train();
  const auto weight = torch::ones({2}).requires_grad_();
  const auto layer = recomputed([&](const std::vector<Tensor>& inputs) {
    count(*router, experts);
    return std::vector<Tensor>{(inputs[0] * weight).exp()};
  });
  layer({torch::ones({2})})[0].sum().backward();
  EXPECT_TRUE(router->loads.equal(torch::tensor({2, 1, 0, 0})));
  // A rate of 0 leaves the biases of a trained model.
  const auto fixed = router_of(0);
  count(*fixed, experts);
  models::RouterSteps({fixed}, std::nullopt, Group::alone("data"), torch::kCPU)
      .finish();
  EXPECT_TRUE(fixed->bias.equal(torch::zeros({4})));
}

// A rank counts for the mixtures that it has, among those of the model.
TEST(RouterSteps, CountTheStep) {
  auto shape = shape_of(0);
  shape.layers = 4;
  shape.dense_layers = 1;
  const auto first = router_of(0, "model.layers.3.mlp");
  const auto second = router_of(0, "model.layers.1.mlp");
  models::RouterSteps steps(
      {first, second}, shape, Group::alone("data"), torch::kCPU);
  first->count(torch::tensor({5, 0, 1, 0}), torch::tensor({2, 0, 0, 0}));
  first->count(torch::tensor({1, 1, 1, 1}), torch::tensor({0, 1, 0, 0}));
  second->count(torch::tensor({0, 0, 0, 9}));
  steps.finish();
  const auto expected = torch::tensor(
      {0, 0, 0, 9, 0, 0, 0, 0, 6, 1, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0});
  EXPECT_TRUE(steps.counts().equal(expected.view({2, 3, 4}))) << steps.counts();
  steps.finish();
  EXPECT_TRUE(steps.counts().equal(torch::zeros_like(steps.counts())));
  // Routers of another model than the job's.
  models::RouterSteps other(
      {router_of(0, "encoder.mlp")}, shape, Group::alone("data"), torch::kCPU);
  other.finish();
  EXPECT_FALSE(other.counts().defined());
}

}  // namespace echelon::bias_balance_test
