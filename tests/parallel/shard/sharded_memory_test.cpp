// How much memory parameters, shards and gradients take.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <mutex>
#include <string>

#include "echelon/profiling/memory_meter.h"
#include "tests/parallel/shard/training.h"

namespace echelon::sharded_memory_test {

using namespace sharding_test;

// In stage 3, unsharded parameters take no memory while they are not used.
TEST(Memory, OfAStage3ModelIsItsShards) {
  Ranks{2}.run([&](World& world) {
    const Plan plan = with_stage(3);
    ShardedNet sharded(world, plan);
    const auto weight = sharded.network->named_parameters()["fc2.weight"];
    EXPECT_EQ(weight.storage().data(), nullptr);
    {
      const auto gathered = sharded.units.unshard({1});
      EXPECT_NE(weight.storage().data(), nullptr);
    }
    EXPECT_EQ(weight.storage().data(), nullptr);
    int64_t shards = 0, unsharded = 0;
    for (const auto& unit : sharded.units.bytes()) {
      shards += unit.shard;
      unsharded += unit.unsharded;
      EXPECT_EQ(unit.gradient, unit.unsharded);
    }
    EXPECT_EQ(2 * shards, unsharded);
    int64_t numel = 0;
    for (const auto& item : sharded.network->named_parameters()) {
      numel += item.value().numel();
    }
    EXPECT_GE(unsharded, numel * 8);
  });
}

// However many units there are, two are unsharded and two have flat gradients.
TEST(Memory, OfAStepIsThatOfAFewUnits) {
  Plan plan = with_stage(3);
  plan.list = LayerList();
  nets::add_linear(plan.list, "in", 6, 64);
  for (int i = 0; i < 8; ++i) {
    nets::add_linear(plan.list, "fc" + std::to_string(i), 64, 64);
  }
  for (const int64_t prefetch : {0, 1}) {
    plan.options.shard.prefetch = prefetch;
    Ranks{2}.run([&](World& world) {
      profiling::MemoryMeter meter;
      const auto counting = meter.count();
      ShardedNet sharded(world, plan);
      forward_backward(sharded, plan, world, 0);
      sharded.units.after_update();
      meter.reset_peak();
      forward_backward(sharded, plan, world, 1);
      int64_t unit = 0, shards = 0;
      for (const auto& one : sharded.units.bytes()) {
        unit = std::max(unit, one.unsharded);
        shards += one.shard;
      }
      EXPECT_GE(unit, 64 * 64 * 8);
      const auto peak = meter.peak();
      EXPECT_EQ(peak[timeline::MemoryKind::parameters], shards);
      const int64_t whole = peak[timeline::MemoryKind::unsharded] +
                            peak[timeline::MemoryKind::gradients] - shards;
      EXPECT_GE(whole, (2 + prefetch) * unit);
      // The first layer's unit, which is small, is there as well.
      EXPECT_LE(whole, (3 + prefetch) * unit + unit / 2);
    });
  }
}

// A unit is resharded when its gradients are complete, and none is prefetched
// for a forward that follows an update.
TEST(Memory, EverythingIsReshardedWhenBackwardEnds) {
  for (const int64_t prefetch : {0, 1, 3}) {
    Plan plan = with_stage(3);
    plan.options.shard.prefetch = prefetch;
    plan.microbatches = 2;
    Ranks{2}.run([&](World& world) {
      ShardedNet sharded(world, plan);
      for (int step = 0; step < 3; ++step) {
        forward_backward(sharded, plan, world, step);
        for (const auto& item : sharded.network->named_parameters()) {
          EXPECT_EQ(item.value().storage().data(), nullptr)
              << item.key() << " step " << step << " prefetch " << prefetch;
        }
        sharded.units.after_update();
      }
    });
  }
}

// Blocks that steps do not need go back to the allocator.
TEST(Memory, OfAllUnitsGoesBack) {
  Ranks{2}.run([&](World& world) {
    Plan plan = with_stage(3);
    plan.list = LayerList();
    for (int i = 0; i < 6; ++i) {
      nets::add_linear(plan.list, "fc" + std::to_string(i), 6, 6);
    }
    profiling::MemoryMeter meter;
    const auto counting = meter.count();
    ShardedNet sharded(world, plan);
    const int64_t unit = sharded.units.bytes()[0].unsharded;
    const int64_t shards = 6 * sharded.units.bytes()[0].shard;
    {
      const auto all = sharded.units.unshard();
      EXPECT_EQ(meter.now()[timeline::MemoryKind::unsharded], 6 * unit);
    }
    for (int step = 0; step < 2; ++step) {
      forward_backward(sharded, plan, world, step);
      sharded.units.after_update();
    }
    const auto kept = meter.now();
    // The next step needs two unsharded units and two flat gradients.
    EXPECT_LE(
        kept[timeline::MemoryKind::unsharded] +
            kept[timeline::MemoryKind::gradients],
        shards + 4 * unit);
  });
}

// What offload leaves on the device between two steps: master copies are
// float64, layers compute in float32.
TEST(Memory, OfOffloadBetweenSteps) {
  for (const int stage : {1, 2, 3}) {
    SCOPED_TRACE(stage);
    Plan plan = with_stage(stage);
    plan.options.compute = torch::kFloat32;
    plan.around = [](Forward forward) {
      return [forward](const Tensors& inputs) {
        return forward({inputs[0].to(torch::kFloat32)});
      };
    };
    const auto kept = [&](bool optimizer, bool shards) {
      timeline::MemoryByKind kept;
      std::mutex mutex;
      plan.options.offload_optimizer = optimizer;
      plan.options.offload_shards = shards;
      Ranks{2}.run([&](World& world) {
        profiling::MemoryMeter meter;
        const auto counting = meter.count();
        ShardedNet sharded(world, plan);
        forward_backward(sharded, plan, world, 0);
        sharded.units.after_update();
        const std::lock_guard lock(mutex);
        if (world.rank() == 0) kept = meter.now();
      });
      return kept;
    };
    const auto here = kept(false, false);
    const int64_t masters = here[timeline::MemoryKind::parameters];
    const auto optimizer = kept(true, false);
    const auto shards = kept(true, true);
    if (stage == 3) {
      // With a copy in the compute dtype, or without.
      EXPECT_EQ(
          optimizer[timeline::MemoryKind::parameters], masters + masters / 2);
    } else {
      EXPECT_EQ(optimizer[timeline::MemoryKind::parameters], masters);
      EXPECT_EQ(optimizer[timeline::MemoryKind::unsharded], masters);
    }
    EXPECT_EQ(shards[timeline::MemoryKind::parameters], masters);
    EXPECT_LT(shards[timeline::MemoryKind::unsharded], masters);
  }
}

}  // namespace echelon::sharded_memory_test
