#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <tuple>

#include "tests/parallel/shard/training.h"

namespace echelon::sharded_units_test {

using namespace sharding_test;

class Stages : public testing::TestWithParam<std::tuple<int, Ranks>> {
 protected:
  Plan plan(const LayerList& list = nets::mlp()) const {
    Plan plan = with_stage(std::get<0>(GetParam()));
    plan.list = list;
    return plan;
  }
  void expect_parity(const Plan& plan) const {
    sharding_test::expect_parity(std::get<1>(GetParam()), plan);
  }
};
INSTANTIATE_TEST_SUITE_P(
    Parity, Stages,
    testing::Combine(
        testing::Values(1, 2, 3),
        testing::Values(
            Ranks{1}, Ranks{2}, Ranks{3}, Ranks{4}, Ranks{2, BackendKind::gloo},
            Ranks{3, BackendKind::gloo})),
    [](const auto& one) {
      return "stage_" + std::to_string(std::get<0>(one.param)) + "_" +
             testing::PrintToString(std::get<1>(one.param));
    });

TEST_P(Stages, Mlp) {
  expect_parity(plan());
}

TEST_P(Stages, Convolutions) {
  expect_parity(plan(nets::conv()));
}

TEST_P(Stages, SkipConnections) {
  expect_parity(plan(nets::skip()));
}

// One parameter that three layers use.
TEST_P(Stages, Tied) {
  Plan plan = this->plan(nets::tied());
  plan.evaluate = true;
  expect_parity(plan);
}

TEST_P(Stages, AdamW) {
  Plan plan = this->plan();
  plan.optimizer = OptimizerKind::adamw;
  expect_parity(plan);
}

TEST_P(Stages, Accumulation) {
  Plan plan = this->plan();
  plan.microbatches = 3;
  expect_parity(plan);
  plan.keep_unsharded = true;
  expect_parity(plan);
}

TEST_P(Stages, Frozen) {
  Plan plan = this->plan();
  plan.microbatches = 2;
  plan.prepare = [](Network& network) {
    size_t index = 0;
    for (auto& item : network.named_parameters()) {
      // A whole layer, and biases of others.
      const bool bias = item.key().ends_with("bias") && index % 3 == 0;
      if (item.key().starts_with("fc2.") || bias) {
        item.value().set_requires_grad(false);
      }
      ++index;
    }
  };
  expect_parity(plan);
}

}  // namespace echelon::sharded_units_test
