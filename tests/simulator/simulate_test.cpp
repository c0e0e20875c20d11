#include "echelon/simulator/simulate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "echelon/cluster/catalogue.h"
#include "echelon/cost/model_catalogue.h"
#include "echelon/error.h"
#include "tests/support/error_text.h"

namespace echelon {
namespace {

using testing::HasSubstr;

Strategy with(Layout layout, int64_t batch) {
  Strategy strategy;
  strategy.layout = layout;
  strategy.global_batch = batch;
  return strategy;
}

double relative(double a, double b) { return std::abs(a - b) / b; }

TEST(Simulate, EachRankByItselfGivesTheSame) {
  struct {
    const char* model;
    const char* cluster;
    Strategy strategy;
  } cases[] = {
      {"gpt2", "h100-sxm:2x8", with({.dp_replicate = 16}, 64)},
      {"gpt2", "h100-sxm:2x8", with({.dp_shard = 16}, 64)},
      {"gpt2", "h100-sxm:1x4", with({.tp = 4}, 8)},
      {"gpt2", "h100-sxm:1x4", with({.pp = 4}, 16)},
      {"llama2-7b", "a100-80gb:4x8", with({.dp_replicate = 2, .tp = 4, .pp = 4}, 32)},
      {"llama2-7b", "a100-80gb:4x8", with({.dp_shard = 4, .cp = 2, .tp = 4}, 32)},
      {"mixtral-8x7b", "h100-sxm:4x8",
       with({.dp_replicate = 2, .tp = 2, .pp = 2, .ep = 4}, 64)},
  };
  cases[1].strategy.zero_stage = 3;
  cases[4].strategy.schedule = "interleaved";
  cases[5].strategy.zero_stage = 2;
  for (const auto& one : cases) {
    for (const int64_t stragglers : {0, 1}) {
      SimulationOptions options{.stragglers = stragglers, .straggler_factor = 1.3};
      const ModelShape model = find_model(one.model);
      const Cluster cluster = find_cluster(one.cluster);
      const SimulatedRun with = simulate(model, one.strategy, cluster, options);
      options.symmetry = false;
      const SimulatedRun without =
          simulate(model, one.strategy, cluster, options);
      EXPECT_LT(
          relative(with.step.step_seconds, without.step.step_seconds), 1e-9)
          << to_string(one.strategy) << " stragglers " << stragglers;
      EXPECT_EQ(without.simulated_ranks, one.strategy.layout.num_ranks());
      if (stragglers == 0) {
        EXPECT_EQ(with.simulated_ranks, one.strategy.layout.pp);
      }
      EXPECT_LT(
          relative(with.step.parts.total(), with.step.step_seconds), 1e-9);
    }
  }
}

}  // namespace
}  // namespace echelon
