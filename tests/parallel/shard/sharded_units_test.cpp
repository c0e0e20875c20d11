#include "echelon/parallel/shard/sharded_units.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "echelon/error.h"
#include "tests/parallel/shard/training.h"

namespace echelon {
namespace sharded_units_test {

using namespace sharding_test;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

class Stages : public testing::TestWithParam<std::tuple<int, Ranks>> {
 protected:
  Plan plan() const { return with_stage(std::get<0>(GetParam())); }
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
  Plan plan = this->plan();
  plan.list = nets::conv();
  expect_parity(plan);
}

TEST_P(Stages, SkipConnections) {
  Plan plan = this->plan();
  plan.list = nets::skip();
  expect_parity(plan);
}

// One parameter that three layers use.
TEST_P(Stages, Tied) {
  Plan plan = this->plan();
  plan.list = nets::tied();
  plan.evaluate = true;
  expect_parity(plan);
}

TEST_P(Stages, AdamW) {
  Plan plan = this->plan();
  plan.optimizer = "adamw";
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

}  // namespace sharded_units_test
}  // namespace echelon
