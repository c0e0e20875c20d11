#include "echelon/parallel/shard/gathered_units.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>

#include "tests/support/ranks.h"

namespace echelon::sharding {
namespace gathered_units_test {

// Each of one layer.
Units make_units(Surroundings& surroundings, int number) {
  Units units;
  for (int i = 0; i < number; ++i) {
    const std::string name = "layer" + std::to_string(i);
    auto unit = std::make_unique<Unit>();
    unit->name = name;
    unit->flats.push_back(std::make_unique<FlatBuffer>(
        surroundings, name,
        FlatBuffer::Named{{name + ".weight", torch::ones({8})}}, false));
    units.push_back(std::move(unit));
  }
  return units;
}

// Ranks must gather in one order, but where autograd puts its nodes is each
// rank's own affair.
TEST(GatheredUnits, ANodeKeepsNothingForOneThatWasWhereItIs) {
  Ranks{2}.run([](World& world) {
    const torch::NoGradGuard no_grad;
    ShardedUnitsOptions options;
    options.shard.stage = 3;
    options.shard.prefetch = 0;
    Surroundings surroundings(
        world.group(), Group::alone("dp_replicate"), options, torch::kCPU);
    Units units = make_units(surroundings, 2);
    GatheredUnits gathered(units, options.shard, /*keep=*/false);
    const size_t first = gathered.make_set({0});
    const size_t second = gathered.make_set({1});

    const char place = 0;
    const auto make_node = [&] {
      return GatheredUnits::Node(&place, [](const void*) {});
    };
    auto node = make_node();
    gathered.use_by_node(first, node, false);
    gathered.use_by_node(second, node, false);
    EXPECT_TRUE(units[0]->gathered());  // it reads both
    EXPECT_TRUE(units[1]->gathered());

    node.reset();
    node = make_node();
    gathered.use_by_node(first, node, false);
    EXPECT_TRUE(units[0]->gathered());
    EXPECT_FALSE(units[1]->gathered());

    gathered.forget();
    node.reset();
    node = make_node();
    gathered.use(second, node, false);
    EXPECT_FALSE(units[0]->gathered());
    EXPECT_TRUE(units[1]->gathered());
  });
}

}  // namespace gathered_units_test
}  // namespace echelon::sharding
