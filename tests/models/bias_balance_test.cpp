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

std::shared_ptr<models::Router> router_of(double rate) {
  return std::make_shared<models::Router>(shape_of(rate));
}

TEST(BiasBalance, BiasesFollowTheLoadOfAllRanks) {
  run_ranks(2, [](World& world) {
    const auto router = router_of(0.25);
    models::BiasBalance balance({router}, world.group());
    // Together 3, 1, 2 and 0 tokens, 1.5 on average. On the first rank alone
    // expert 1 would be above it.
    router->count(
        world.rank() == 0 ? torch::tensor({{0, 1}}) : torch::tensor({{0, 2}}));
    router->count(
        world.rank() == 0 ? torch::tensor({{0}}) : torch::tensor({{2}}));
    balance.step();
    const auto once = torch::tensor({-0.25, 0.25, -0.25, 0.25});
    EXPECT_TRUE(router->bias.equal(once)) << router->bias;
    // Counts begin anew. A rank may have no token.
    if (world.rank() == 1) router->count(torch::tensor({{3, 1}}));
    balance.step();
    const auto twice = once + torch::tensor({0.25, -0.25, 0.25, -0.25});
    EXPECT_TRUE(router->bias.equal(twice)) << router->bias;
    // An even load moves nothing.
    router->count(torch::tensor({{0, 1, 2, 3}}));
    balance.step();
    EXPECT_TRUE(router->bias.equal(twice)) << router->bias;
  });
}

TEST(BiasBalance, OnlyForwardPassesOfTrainingCount) {
  const auto router = router_of(0.25);
  const auto experts = torch::tensor({{0, 0, 1}});
  {
    const torch::NoGradGuard no_grad;
    router->count(experts);
  }
  router->eval();
  router->count(experts);
  EXPECT_FALSE(router->loads.defined());
  router->train();
  const auto weight = torch::ones({2}).requires_grad_();
  const auto layer = recomputed([&](const std::vector<Tensor>& inputs) {
    router->count(experts);
    return std::vector<Tensor>{(inputs[0] * weight).exp()};
  });
  layer({torch::ones({2})})[0].sum().backward();
  EXPECT_TRUE(router->loads.equal(torch::tensor({2, 1, 0, 0})));
  // A rate of 0 leaves the biases of a trained model.
  const auto fixed = router_of(0);
  fixed->count(experts);
  EXPECT_FALSE(fixed->loads.defined());
}

}  // namespace echelon::bias_balance_test
