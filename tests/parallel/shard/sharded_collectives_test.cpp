// ShardedUnits starts these collectives, in this order.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "tests/parallel/shard/training.h"

namespace echelon::sharded_collectives_test {

using namespace sharding_test;

// The labels of a step after the first, on rank 0.
Counts labels_of_step(int ranks, const Plan& plan) {
  Counts counts;
  std::mutex mutex;
  Ranks{ranks}.run([&](World& world) {
    const Groups groups(world, plan.replicate);
    ShardedNet sharded(build(plan), groups.shard, groups.replicate, plan);
    auto optimizer = sharded.optimizer(plan);
    uint64_t from = 0;
    for (int step = 0; step < 2; ++step) {
      if (step == 1) from = world.history().count();
      forward_backward(sharded, plan, world, step);
      optimizer->step();
      sharded.units.after_update();
    }
    const std::lock_guard lock(mutex);
    if (world.rank() == 0) counts = labels_since(world, from);
  });
  return counts;
}

TEST(Collectives, OfEachStageInOneStep) {
  // 6 units in order: fc1 fc2 fc3 norm fc4 fc5.
  Plan plan = with_stage(3);
  plan.options.shard.prefetch = 0;
  auto counts = labels_of_step(2, plan);
  for (const char* name : {"fc2", "fc3", "norm", "fc4"}) {
    EXPECT_EQ(counts["gather " + std::string(name)], 2) << name;
    EXPECT_EQ(counts["reduce " + std::string(name)], 1) << name;
  }
  // Backward does not read fc1: the input requires no gradient.
  EXPECT_EQ(counts["gather fc1"], 1);
  EXPECT_EQ(counts["reduce fc1"], 1);
  // fc5 stays unsharded from forward to backward.
  EXPECT_EQ(counts["gather fc5"], 1);
  EXPECT_EQ(counts["reduce fc5"], 1);
  EXPECT_EQ(counts["used units"], 0);

  plan.options.shard.prefetch = 1;
  counts = labels_of_step(2, plan);
  EXPECT_EQ(counts["gather fc3"], 2);
  EXPECT_EQ(counts["gather fc4"], 1);
  EXPECT_EQ(counts["gather fc5"], 1);

  plan.options.unshard_once = true;
  counts = labels_of_step(2, plan);
  for (const char* name : {"fc1", "fc2", "fc3", "norm", "fc4", "fc5"}) {
    EXPECT_EQ(counts["gather " + std::string(name)], 1) << name;
  }

  plan = with_stage(2);
  plan.microbatches = 3;
  counts = labels_of_step(2, plan);
  EXPECT_EQ(counts["gather fc1"], 1);
  EXPECT_EQ(counts["reduce fc1"], 3);
  EXPECT_EQ(counts["reduce fc5"], 3);

  plan.keep_unsharded = true;
  EXPECT_EQ(labels_of_step(2, plan)["reduce fc1"], 1);

  plan = with_stage(1);
  plan.microbatches = 3;
  counts = labels_of_step(2, plan);
  EXPECT_EQ(counts["gather fc1"], 1);
  EXPECT_EQ(counts["reduce fc1"], 1);

  plan.replicate = 2;
  counts = labels_of_step(4, plan);
  EXPECT_EQ(counts["reduce fc1"], 1);
  EXPECT_EQ(counts["replicate fc1"], 1);
}

TEST(Collectives, NoneOnOneRank) {
  for (const int stage : {1, 2, 3}) {
    EXPECT_TRUE(labels_of_step(1, with_stage(stage)).empty());
  }
}

// The next unit is all-gathered while this one computes, in forward and
// backward.
TEST(Collectives, PrefetchTheNextUnit) {
  const Plan plan = with_stage(3);
  Ranks{2}.run([&](World& world) {
    ShardedNet sharded(world, plan);
    const auto begun = [&] { return labels_since(world, 0); };
    // One layer at a time: fc1, act1, fc2.
    Tensors x = sharded.forwards[0]({rows_of(plan, 0, 0)});
    EXPECT_EQ(begun()["gather fc2"], 1);
    EXPECT_EQ(begun()["gather fc3"], 0);
    x = sharded.forwards[2](sharded.forwards[1](x));
    EXPECT_EQ(begun()["gather fc3"], 1);
    EXPECT_EQ(begun()["gather norm"], 0);
    for (size_t i = 3; i < sharded.forwards.size(); ++i)
      x = sharded.forwards[i](x);
    x[0].sum().backward();
    sharded.units.finish();
    // Reductions begin while backward all-gathers the next units.
    std::map<std::string, size_t> last;
    const auto all = world.history().snapshot();
    for (size_t i = 0; i < all.size(); ++i) last[all[i].label] = i;
    EXPECT_LT(last.at("reduce fc5"), last.at("gather fc2"));
    EXPECT_LT(last.at("reduce fc5"), last.at("reduce fc4"));
    EXPECT_LT(last.at("gather fc2"), last.at("reduce fc3"));
  });
}

// prefetch_bytes limits any depth.
TEST(Collectives, PrefetchUpToALimitOfBytes) {
  Plan plan = with_stage(3);
  plan.options.shard.prefetch = 100;
  Ranks{2}.run([&](World& world) {
    const auto gathers_of_fc1 = [&](int64_t prefetch_bytes) {
      Plan mine = plan;
      mine.options.shard.prefetch_bytes = prefetch_bytes;
      ShardedNet sharded(world, mine);
      const uint64_t from = world.history().count();
      sharded.forwards[0]({rows_of(mine, 0, 0)});
      return labels_since(world, from).size();
    };
    int64_t next = 0, two = 0;  // bytes of fc2, and of fc2 with fc3
    {
      const ShardedNet sharded(world, plan);
      next = sharded.units.bytes()[1].unsharded;
      two = next + sharded.units.bytes()[2].unsharded;
    }
    EXPECT_EQ(gathers_of_fc1(0), 6U);  // no limit: all
    EXPECT_EQ(gathers_of_fc1(two), 3U);
    EXPECT_EQ(gathers_of_fc1(two - 1), 2U);
    EXPECT_EQ(gathers_of_fc1(next - 1), 1U);
  });
}

// Layers run in another order than they were added, one of them twice: from the
// second step on no all-gather is in vain.
TEST(Collectives, LearnTheOrderOfUse) {
  Plan plan = with_stage(3);
  plan.list = LayerList();
  for (int i = 0; i < 5; ++i) {
    nets::add_linear(plan.list, "fc" + std::to_string(i), 6, 6);
  }
  const std::vector<size_t> order = {3, 0, 4, 0, 1, 2};
  const auto gathers = [&](int64_t prefetch) {
    int count = 0;
    std::mutex mutex;
    plan.options.shard.prefetch = prefetch;
    Ranks{2}.run([&](World& world) {
      ShardedNet sharded(world, plan);
      uint64_t from = 0;
      for (int step = 0; step < 3; ++step) {
        from = world.history().count();
        Tensors x = {rows_of(plan, 0, 0)};
        for (const size_t layer : order) x = sharded.forwards[layer](x);
        x[0].sum().backward();
        sharded.units.finish();
        sharded.units.after_update();
      }
      const std::lock_guard lock(mutex);
      if (world.rank() > 0) return;
      for (const auto& [_, times] : labels_since(world, from, "gather ")) {
        count += times;
      }
    });
    return count;
  };
  // Forward gathers all. Backward gathers all but the last layer, which is
  // still there, and the first, whose weight it does not read.
  EXPECT_EQ(gathers(0), 6 + 4);
  // Prefetching adds none: layer 0 stays while layer 4 is used.
  EXPECT_LE(gathers(1), 6 + 4);
}

}  // namespace echelon::sharded_collectives_test
