// A single rank can diagnose a NaN, even if batch statistics are computed over
// all ranks.
#include <gtest/gtest.h>

#include <cmath>

#include "echelon/comm/world.h"
#include "echelon/models/make_network.h"
#include "echelon/parallel/data/sync_batch_norm.h"

namespace echelon::diagnosis_test {

TEST(Diagnosis, ASingleRankNamesTheLayer) {
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

// The same for a user's own layers with torch's modules in them.
TEST(Diagnosis, ASingleRankNamesTheLayerOfAUser) {
  run_ranks(2, [](World& world) {
    LayerList list;
    list.add("first", [] {
      return torch::nn::Sequential(
          torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
    });
    list.add("bare", [] {
      return torch::nn::BatchNorm1d(
          torch::nn::BatchNorm1dOptions(4).track_running_stats(false));
    });
    list.add("last", [] { return torch::nn::Linear(4, 2); });
    const auto network = build_network(list, 0, 3, 1);
    const auto converted = convert_sync_batch_norm(*network, world.group());
    EXPECT_EQ(converted.size(), 2u);
    const auto x = torch::rand({4, 3});
    network->forward(x);
    const auto buffers = network->named_buffers();
    const auto mean = buffers["first.1.running_mean"].clone();
    if (world.rank() == 0) {
      EXPECT_FALSE(network->first_nonfinite_layer(x).has_value());
      const torch::NoGradGuard no_grad;
      network->named_parameters()["last.bias"].fill_(NAN);
      const auto found = network->first_nonfinite_layer(x);
      ASSERT_TRUE(found.has_value());
      EXPECT_EQ(found->layer, "last");
    }
    EXPECT_TRUE(mean.equal(buffers["first.1.running_mean"]));
    network->forward(x);  // together again
    EXPECT_FALSE(mean.equal(buffers["first.1.running_mean"]));
  });
}

}  // namespace echelon::diagnosis_test
