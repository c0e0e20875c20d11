#include "echelon/cost/choose_recompute.h"

#include <gmock/gmock.h>

#include <limits>
#include <random>
#include <vector>

namespace echelon::cost::choose_recompute_test {

using testing::Each;
using testing::ElementsAre;

// The fewest FLOPs of all choices that fit, by trying each.
double least_flops(
    const std::vector<RecomputeCost>& layers, int64_t budget, size_t at = 0) {
  if (at == layers.size()) {
    return budget >= 0 ? 0 : std::numeric_limits<double>::infinity();
  }
  double least = std::numeric_limits<double>::infinity();
  for (const auto choice : kRecomputes) {
    least = std::min(
        least,
        layers[at].again(choice) +
            least_flops(layers, budget - layers[at].kept(choice), at + 1));
  }
  return least;
}

// Costs and bytes that have little to do with each other.
std::vector<RecomputeCost> any_layers(size_t count, std::mt19937& random) {
  std::uniform_int_distribution<int64_t> bytes(0, 100);
  std::vector<RecomputeCost> layers(count);
  for (auto& layer : layers) {
    for (size_t i = 0; i < 3; ++i) {
      layer.kept_bytes[i] = bytes(random);
      layer.again_flops[i] = i == 0 ? 0 : static_cast<double>(bytes(random));
    }
  }
  return layers;
}

void expect_sums(
    const std::vector<RecomputeCost>& layers, const RecomputeChoice& choice) {
  ASSERT_EQ(choice.layers.size(), layers.size());
  int64_t bytes = 0;
  double flops = 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    bytes += layers[i].kept(choice.layers[i]);
    flops += layers[i].again(choice.layers[i]);
  }
  EXPECT_EQ(choice.kept_bytes, bytes);
  EXPECT_DOUBLE_EQ(choice.again_flops, flops);
}

TEST(ChooseRecompute, IsTheBestOfAllChoices) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 300; ++trial) {
    const auto layers = any_layers(1 + trial % 7, random);
    for (const int64_t budget : {0, 40, 120, 200, 333, 1000}) {
      const auto choice = choose_recompute(layers, budget);
      expect_sums(layers, choice);
      const double least = least_flops(layers, budget);
      EXPECT_EQ(choice.fits, least < std::numeric_limits<double>::infinity());
      if (!choice.fits) continue;
      EXPECT_LE(choice.kept_bytes, budget);
      EXPECT_DOUBLE_EQ(choice.again_flops, least);
    }
  }
}

TEST(ChooseRecompute, BigBudgetsComputeNothingAgain) {
  const std::vector<RecomputeCost> layers(
      4, {"block", {100, 40, 10}, {0, 5, 50}});
  EXPECT_THAT(choose_recompute(layers, 400).layers, Each(Recompute::none));
  const auto one_less = choose_recompute(layers, 399);
  EXPECT_THAT(
      one_less.layers, ElementsAre(
                           Recompute::none, Recompute::none, Recompute::none,
                           Recompute::selective));
  EXPECT_EQ(one_less.again_flops, 5);
}

TEST(ChooseRecompute, WhatDoesNotFitIsSaid) {
  const std::vector<RecomputeCost> layers(
      3, {"block", {100, 40, 10}, {0, 5, 50}});
  const auto choice = choose_recompute(layers, 29);
  EXPECT_FALSE(choice.fits);
  EXPECT_THAT(choice.layers, Each(Recompute::all));
  EXPECT_EQ(choice.kept_bytes, 30);
  EXPECT_TRUE(choose_recompute(layers, 30).fits);
  EXPECT_TRUE(choose_recompute({}, 0).fits);
}

// There are too many different sums to keep all of them.
TEST(ChooseRecompute, ThinnedSumsStillFitAndAreNearlyBest) {
  std::mt19937 random(2);
  std::uniform_int_distribution<int64_t> bytes(1 << 20, 1 << 30);
  std::vector<RecomputeCost> layers(60);
  int64_t all = 0;
  for (auto& layer : layers) {
    layer.kept_bytes = {bytes(random), 0, bytes(random) / 50};
    layer.kept_bytes[1] = layer.kept_bytes[0] / 3;
    layer.again_flops = {
        0, static_cast<double>(bytes(random)) / 7,
        static_cast<double>(bytes(random))};
    all += layer.kept_bytes[0];
  }
  for (const int64_t budget : {all / 4, all / 2, all * 3 / 4}) {
    const auto fine = choose_recompute(layers, budget, 20000);
    const auto coarse = choose_recompute(layers, budget, 500);
    expect_sums(layers, coarse);
    EXPECT_TRUE(coarse.fits);
    EXPECT_LE(coarse.kept_bytes, budget);
    EXPECT_LE(fine.kept_bytes, budget);
    EXPECT_LE(coarse.again_flops, 1.05 * fine.again_flops);
  }
}

}  // namespace echelon::cost::choose_recompute_test
