// Sharded data parallelism with ranks, as processes, that share one GPU, against
// one rank on the CPU, in float64: every stage, hybrid, offload, accumulation.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/launch/process_ranks.h"
#include "tests/parallel/shard/training.h"
#include "tests/support/gpu.h"

namespace echelon {
namespace {

using namespace sharding_test;
using testing_support::is_rank;
using testing_support::kRunByOthers;

struct Case {
  std::string name;
  Plan plan;
};

// What is done differently on a GPU: streams, pinned memory, copies.
std::vector<Case> cases(int ranks) {
  std::vector<Case> all;
  for (const int stage : {1, 2, 3}) {
    const auto add = [&](const std::string& name) -> Plan& {
      all.push_back(
          {"stage " + std::to_string(stage) + ", " + name, with_stage(stage)});
      return all.back().plan;
    };
    add("mlp").optimizer = "adamw";
    add("convolutions").list = nets::conv();
    auto& tied = add("tied, evaluated");
    tied.list = nets::tied();
    tied.evaluate = true;
    add("accumulation").microbatches = 3;
    auto& whole = add("accumulation, kept whole");
    whole.microbatches = 3;
    whole.keep_whole = true;
    auto& optimizer = add("optimizer on the host");
    optimizer.options.offload_optimizer = true;
    optimizer.optimizer = "adamw";
    auto& shards = add("shards on the host");
    shards.options.offload_shards = true;
    shards.microbatches = 2;
    add("gathered once").options.gather_once = true;
    auto& ahead = add("two gathered ahead");
    ahead.options.shard.prefetch = 2;
    ahead.list = nets::skip();
    if (ranks % 2 == 0 && ranks > 2) add("hybrid").replicate = 2;
  }
  return all;
}

class Rank : public GpuTest {
 protected:
  static void SetUpTestSuite() {
    if (!is_rank()) return;
    world_ = std::make_unique<World>(World::from_environment(
        {.backend = BackendKind::local, .timeout = std::chrono::minutes(1)}));
  }
  static void TearDownTestSuite() { world_.reset(); }
  void SetUp() override {
    if (!is_rank()) GTEST_SKIP() << kRunByOthers;
    GpuTest::SetUp();
  }
  static std::unique_ptr<World> world_;
};
std::unique_ptr<World> Rank::world_;

TEST_F(Rank, IsItsPartOfTheCpus) {
  for (auto& [name, plan] : cases(world_->size())) {
    SCOPED_TRACE(name);
    const auto expected = on_one_device(plan);
    plan.device = test_gpu();
    expect_parity_on(*world_, plan, expected, 1e-9);
  }
}

// Masters in float64, the rest in float32: as near as that comes.
TEST_F(Rank, LowPrecisionFollowsTheCpu) {
  for (const int stage : {1, 2, 3}) {
    for (const bool offload : {false, true}) {
      SCOPED_TRACE("stage " + std::to_string(stage));
      Plan plan = with_stage(stage);
      const auto expected = on_one_device(plan);
      plan.device = test_gpu();
      plan.options.compute = torch::kFloat32;
      plan.options.offload_optimizer = offload;
      plan.input = [plan](int step, int microbatch) {
        Plan plain = plan;
        plain.input = [](int, int) { return Tensor(); };
        return rows_of(plain, step, microbatch).to(torch::kFloat32);
      };
      expect_parity_on(*world_, plan, expected, 1e-4);
    }
  }
}

class ShardGpu : public GpuTest {};

TEST_F(ShardGpu, TwoRanksShareTheGpu) {
  testing_support::run_as_ranks(2, "Rank.*", 2);
}

TEST_F(ShardGpu, FourRanksShareTheGpu) {
  testing_support::run_as_ranks(4, "Rank.*", 2);
}

// Nothing is cut: low precision and offload alone.
TEST_F(ShardGpu, OneRank) {
  testing_support::run_as_ranks(1, "Rank.*", 2);
}

}  // namespace
}  // namespace echelon
