#include "echelon/parallel/shard/units.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>

#include "tests/support/ranks.h"

namespace echelon::sharding::unsharded_units_test {

// Units of one layer each.
Units make_units(ShardContext& context, int number) {
  Units units;
  for (int i = 0; i < number; ++i) {
    const std::string name = "layer" + std::to_string(i);
    auto unit = std::make_unique<Unit>();
    unit->name = name;
    unit->flats.push_back(std::make_unique<FlatBuffer>(
        context, name, FlatBuffer::Named{{name + ".weight", torch::ones({8})}},
        false));
    units.push_back(std::move(unit));
  }
  return units;
}

// All ranks must all-gather in one order, while the addresses of autograd's
// nodes differ from rank to rank.
TEST(UnshardedUnits, ANodeDoesNotKeepUnitsOfAnEarlierNode) {
  Ranks{2}.run([](World& world) {
    const torch::NoGradGuard no_grad;
    ShardedUnitsOptions options;
    options.shard.stage = 3;
    options.shard.prefetch = 0;
    ShardContext context(
        world.group(), Group::alone("dp_replicate"), options, torch::kCPU);
    Units units = make_units(context, 2);
    UnshardedUnits unsharded(units, options.shard, /*keep=*/false);
    const size_t first = unsharded.make_set({0});
    const size_t second = unsharded.make_set({1});

    UnshardedUnits::Node node(std::in_place, 1, 7);
    unsharded.use_by_node(first, node, false);
    unsharded.use_by_node(second, node, false);
    EXPECT_TRUE(units[0]->unsharded());  // the node reads both
    EXPECT_TRUE(units[1]->unsharded());

    node = {1, 8};
    unsharded.use_by_node(first, node, false);
    EXPECT_TRUE(units[0]->unsharded());
    EXPECT_FALSE(units[1]->unsharded());

    unsharded.reset_order();
    node = {2, 8};
    unsharded.use(second, node, false);
    EXPECT_FALSE(units[0]->unsharded());
    EXPECT_TRUE(units[1]->unsharded());
  });
}

}  // namespace echelon::sharding::unsharded_units_test
