// The diagnosis of a NaN is run by one rank alone, also where batch statistics
// are taken over all of them.
#include <gtest/gtest.h>

#include <cmath>

#include "echelon/comm/world.h"
#include "echelon/models/make_network.h"
#include "echelon/parallel/data/sync_batch_norm.h"

namespace echelon {
namespace {

TEST(Diagnosis, OneRankAloneNamesTheLayer) {
  run_ranks(2, [](World& world) {
    ModelOptions options;
    options.name = "resnet18";
    const auto network = make_network(options, {3, 8, 8}, 10, 0);
    const auto converted = convert_sync_batch_norm(*network, world.group());
    const torch::NoGradGuard no_grad;
    network->named_parameters()["layer2.1.conv1.weight"].fill_(NAN);
    if (world.rank() == 0) {
      const auto found =
          network->first_nonfinite_layer(torch::rand({4, 3, 8, 8}));
      ASSERT_TRUE(found.has_value());
      EXPECT_EQ(found->layer, "layer2.1");
    }
  });
}

}  // namespace
}  // namespace echelon
