#include "echelon/layout/partition.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>

#include "tests/support/error_text.h"

namespace echelon::partition_test {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using Partition = std::vector<size_t>;

constexpr int64_t kGiB = int64_t{1} << 30;

double
largest_sum(const std::vector<double>& costs, const Partition& partition) {
  double largest = 0.0;
  for (size_t s = 0; s + 1 < partition.size(); ++s) {
    largest = std::max(
        largest,
        std::accumulate(
            costs.begin() + static_cast<int64_t>(partition[s]),
            costs.begin() + static_cast<int64_t>(partition[s + 1]), 0.0));
  }
  return largest;
}

bool fits(const Partition& partition, const SliceMemory& memory) {
  const auto bytes = slice_bytes(partition, memory);
  for (size_t s = 0; s < bytes.size(); ++s) {
    if (!memory.limits.empty() && bytes[s] > memory.limits[s]) return false;
  }
  return true;
}

// Every partition of n layers.
void each_partition(
    size_t layers, size_t slices,
    const std::function<void(const Partition&)>& see) {
  Partition partition{0};
  const std::function<void()> extend = [&] {
    if (partition.size() == slices) {
      partition.push_back(layers);
      see(partition);
      partition.pop_back();
      return;
    }
    for (size_t next = partition.back() + 1;
         next + (slices - partition.size()) <= layers; ++next) {
      partition.push_back(next);
      extend();
      partition.pop_back();
    }
  };
  extend();
}

void expect_is_cut(const Partition& partition, size_t layers, size_t slices) {
  ASSERT_EQ(partition.size(), slices + 1);
  EXPECT_EQ(partition.front(), 0u);
  EXPECT_EQ(partition.back(), layers);
  for (size_t s = 0; s < slices; ++s) EXPECT_LT(partition[s], partition[s + 1]);
}

TEST(Balance, CutsEvenly) {
  EXPECT_THAT(balance({1, 1, 1, 3}, 2), ElementsAre(0, 3, 4));
  EXPECT_THAT(balance({5, 1, 1, 1, 1, 1}, 2), ElementsAre(0, 1, 6));
  EXPECT_THAT(balance({1, 1, 1, 1}, 4), ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(balance({7}, 1), ElementsAre(0, 1));
  // All slices are even: 3 3 3 1 has the same largest slice.
  const auto partition = balance(std::vector<double>(10, 1.0), 4);
  for (size_t s = 0; s < 4; ++s) {
    EXPECT_THAT(partition[s + 1] - partition[s], testing::AnyOf(2u, 3u));
  }
  // Layers without cost still spread.
  EXPECT_THAT(balance({0, 0, 0, 0}, 2), ElementsAre(0, 2, 4));
}

TEST(Balance, EqualsTheBestOfAllCuts) {
  std::mt19937 random(7);
  for (int round = 0; round < 400; ++round) {
    const size_t layers = 1 + random() % 11;
    const size_t slices = 1 + random() % layers;
    std::vector<double> costs(layers);
    for (double& cost : costs) cost = static_cast<double>(random() % 12);
    double best = 1e300;
    each_partition(layers, slices, [&](const Partition& partition) {
      best = std::min(best, largest_sum(costs, partition));
    });
    const auto partition = balance(costs, slices);
    expect_is_cut(partition, layers, slices);
    EXPECT_EQ(largest_sum(costs, partition), best);
  }
}

TEST(Balance, WithinMemoryEqualsTheBestOfAllCutsThatFit) {
  std::mt19937 random(8);
  int refused = 0;
  int moved = 0;
  for (int round = 0; round < 600; ++round) {
    const size_t layers = 1 + random() % 9;
    const size_t slices = 1 + random() % layers;
    std::vector<double> costs(layers);
    SliceMemory memory;
    for (double& cost : costs) {
      cost = static_cast<double>(random() % 12);
      memory.bytes.push_back(static_cast<int64_t>(random() % 9));
      memory.stored_bytes.push_back(static_cast<int64_t>(random() % 4));
    }
    for (size_t s = 0; s < slices; ++s) {
      memory.stored.push_back(static_cast<int64_t>(slices - s));
      memory.limits.push_back(
          random() % 5 == 0 ? kNoLimit
                            : static_cast<int64_t>(4 + random() % 30));
    }
    double best = 1e300;
    each_partition(layers, slices, [&](const Partition& partition) {
      if (fits(partition, memory))
        best = std::min(best, largest_sum(costs, partition));
    });
    if (best == 1e300) {
      ++refused;
      EXPECT_THROW(balance(costs, slices, memory), ConfigError);
      continue;
    }
    const auto partition = balance(costs, slices, memory);
    expect_is_cut(partition, layers, slices);
    EXPECT_TRUE(fits(partition, memory));
    EXPECT_EQ(largest_sum(costs, partition), best);
    moved += !fits(balance(costs, slices), memory);
  }
  EXPECT_GT(refused, 50);
  EXPECT_GT(moved, 50);
}

// Slices are as fast as their devices.
TEST(Balance, BySpeedEqualsTheBestOfAllCuts) {
  EXPECT_THAT(
      balance(
          std::vector<double>(9, 1.0), 2, {.bytes = std::vector<int64_t>(9)},
          {1.0, 0.5}),
      ElementsAre(0, 6, 9));
  std::mt19937 random(9);
  int refused = 0;
  for (int round = 0; round < 600; ++round) {
    const size_t layers = 1 + random() % 9;
    const size_t slices = 1 + random() % layers;
    std::vector<double> costs(layers);
    std::vector<double> speeds(slices);
    SliceMemory memory;
    for (double& cost : costs) {
      cost = static_cast<double>(random() % 12);
      memory.bytes.push_back(static_cast<int64_t>(random() % 9));
    }
    for (double& speed : speeds) speed = 0.1 + 0.1 * (random() % 10);
    for (size_t s = 0; round % 2 == 1 && s < slices; ++s) {
      memory.limits.push_back(static_cast<int64_t>(6 + random() % 30));
    }
    const auto slowest = [&](const Partition& partition) {
      double most = 0;
      for (size_t s = 0; s < slices; ++s) {
        most = std::max(
            most,
            largest_sum(costs, {partition[s], partition[s + 1]}) / speeds[s]);
      }
      return most;
    };
    double best = 1e300;
    each_partition(layers, slices, [&](const Partition& partition) {
      if (fits(partition, memory)) best = std::min(best, slowest(partition));
    });
    if (best == 1e300) {
      ++refused;
      continue;
    }
    const auto partition = balance(costs, slices, memory, speeds);
    expect_is_cut(partition, layers, slices);
    EXPECT_TRUE(fits(partition, memory));
    EXPECT_NEAR(slowest(partition), best, 1e-9 * best);
  }
  EXPECT_GT(refused, 20);
  EXPECT_LT(refused, 300);
  const SliceMemory memory{.bytes = {1, 1, 1}};
  EXPECT_THAT(
      error_text<ConfigError>([&] {
        balance({1, 1, 1}, 2, memory, {1});
      }),
      HasSubstr("1 speed for 2 slices"));
  EXPECT_THAT(
      error_text<ConfigError>([&] {
        balance({1, 1, 1}, 2, memory, {1, 0});
      }),
      HasSubstr("the speed of slice 1 is 0; speeds are finite and above 0"));
}

TEST(Balance, ByMemoryFillsEachSliceToTheSameShare) {
  const SliceMemory memory{
      .bytes = std::vector<int64_t>(12, kGiB), .limits = {8 * kGiB, 16 * kGiB}};
  EXPECT_THAT(balance_memory(2, memory), ElementsAre(0, 4, 12));
  // No limits: the largest need is the smallest possible.
  EXPECT_THAT(
      balance_memory(2, {.bytes = {4, 1, 1, 1, 1}}), ElementsAre(0, 1, 5));
  // The first stage of a pipeline stores more microbatches than the last.
  EXPECT_THAT(
      balance_memory(
          2, {.bytes = std::vector<int64_t>(9, 0),
              .stored_bytes = std::vector<int64_t>(9, 10),
              .stored = {2, 1}}),
      ElementsAre(0, 3, 9));
}

TEST(Balance, ManyLayersInManySlices) {
  std::mt19937 random(9);
  std::vector<double> costs(6000);
  SliceMemory memory;
  for (double& cost : costs) {
    cost = 1.0 + static_cast<double>(random() % 1000) / 7.0;
    memory.bytes.push_back(static_cast<int64_t>(1 + random() % 1000));
  }
  memory.limits.assign(1024, 5000);
  const auto partition = balance(costs, 1024);
  expect_is_cut(partition, costs.size(), 1024);
  const auto within = balance(costs, 1024, memory);
  EXPECT_TRUE(fits(within, memory));
  EXPECT_GE(largest_sum(costs, within), largest_sum(costs, partition) - 1e-6);
}

// What a call refuses.
template <class Call>
std::string refusal(const Call& call) {
  return error_text<ConfigError>(call);
}

TEST(Balance, RefusesMoreSlicesThanLayers) {
  const std::vector<double> three = {1, 2, 3}, negative = {1, -2};
  EXPECT_THAT(
      refusal([&] { balance(three, 5); }),
      AllOf(
          HasSubstr("3 layers is partitioned into 5 slices"),
          HasSubstr("use 3 or fewer slices")));
  EXPECT_THROW(balance({1}, 0), ConfigError);
  EXPECT_THROW(balance({}, 1), ConfigError);
  EXPECT_THAT(
      refusal([&] { balance(negative, 1); }), HasSubstr("layer 1 is -2"));
}

TEST(Balance, RefusesWhatFitsNowhereWithNumbers) {
  const SliceMemory memory{
      .bytes = {3 * kGiB, 3 * kGiB, 6 * kGiB},
      .limits = {4 * kGiB, 8 * kGiB},
      .names = {"conv1", "conv2", "fc"}};
  const std::vector<double> costs = {1, 1, 1};
  const Partition partition = {0, 2, 3};
  EXPECT_THAT(
      refusal([&] { balance(costs, 2, memory); }),
      AllOf(
          HasSubstr("slice 0 (layer \"conv1\") needs 3 GiB of its 4 GiB"),
          HasSubstr("slice 1 (layers \"conv2\" to \"fc\") needs 9 GiB of its 8 "
                    "GiB")));
  EXPECT_THAT(
      refusal([&] { check_fits(partition, memory); }),
      HasSubstr("needs 6 GiB of its 4 GiB"));
  EXPECT_NO_THROW(
      check_fits(partition, {.bytes = {1, 1, 1}, .limits = {2, 1}}));
  SliceMemory many{
      .bytes = std::vector<int64_t>(64, kGiB),
      .limits = std::vector<int64_t>(64, 1)};
  const auto fill = [&] { balance_memory(64, many); };
  EXPECT_THAT(refusal(fill), HasSubstr("and 56 more slices"));
  many.limits.pop_back();
  EXPECT_THAT(refusal(fill), HasSubstr("limits has 63 values for 64 slices"));
}

const std::vector<std::string> kNames = {
    "conv1", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer3.0", "fc"};

TEST(CutAt, TakesNamesAndTheirBeginnings) {
  EXPECT_THAT(
      partition_at(kNames, {"layer2", "layer3"}, 3), ElementsAre(0, 3, 5, 7));
  EXPECT_THAT(
      partition_at(kNames, {"layer1.1", "fc"}, 3), ElementsAre(0, 2, 6, 7));
  EXPECT_THAT(partition_at(kNames, {}, 1), ElementsAre(0, 7));
}

TEST(CutAt, SaysWhatIsWrong) {
  const auto error = [](std::vector<std::string> first, size_t slices) {
    return error_text<ConfigError>(
        [&] { partition_at(kNames, first, slices); });
  };
  EXPECT_THAT(
      error({"layr2"}, 2),
      AllOf(
          HasSubstr("cut = [\"layr2\"]: no layer is called \"layr2\""),
          HasSubstr("did you mean \"layer2\"?")));
  EXPECT_THAT(error({"layer2.7"}, 2), HasSubstr("did you mean \"layer2."));
  EXPECT_THAT(error({"layer"}, 2), HasSubstr("no layer is called"));
  EXPECT_THAT(
      error({"layer3", "layer2"}, 3),
      HasSubstr("\"layer2\" comes before \"layer3\""));
  EXPECT_THAT(
      error({"layer2", "layer2.0"}, 3),
      HasSubstr("begins the same slice as \"layer2\""));
  EXPECT_THAT(error({"conv1"}, 2), HasSubstr("is the first layer"));
  EXPECT_THAT(
      error({"layer2", "fc"}, 2),
      HasSubstr("2 names begin 3 slices, but there are 2; give 1 name,"));
  EXPECT_THAT(error({}, 8), HasSubstr("7 layers is partitioned into 8 slices"));
}

double
worst(const std::vector<int64_t>& shares, const std::vector<double>& weights) {
  double most = 0;
  for (size_t i = 0; i < shares.size(); ++i) {
    most = std::max(most, static_cast<double>(shares[i]) / weights[i]);
  }
  return most;
}

// The best of all ways to share out.
double least_worst(
    int64_t units, const std::vector<double>& weights,
    std::vector<int64_t> shares) {
  if (shares.size() + 1 == weights.size()) {
    shares.push_back(units);
    return worst(shares, weights);
  }
  double best = 1e300;
  const auto after = static_cast<int64_t>(weights.size() - shares.size() - 1);
  for (int64_t share = 1; share <= units - after; ++share) {
    auto more = shares;
    more.push_back(share);
    best = std::min(best, least_worst(units - share, weights, more));
  }
  return best;
}

TEST(ShareOut, IsTheBestOfAllWays) {
  for (const auto& weights : std::vector<std::vector<double>>{
           {1, 1, 1},
           {1, 0.3, 0.3},
           {0.05, 1, 0.7},
           {1, 0.31},
           {0.2, 0.2, 1, 1}}) {
    for (int64_t units = static_cast<int64_t>(weights.size()); units < 25;
         ++units) {
      const auto shares = share_out(units, weights);
      EXPECT_EQ(
          std::accumulate(shares.begin(), shares.end(), int64_t{0}), units);
      EXPECT_NEAR(
          worst(shares, weights), least_worst(units, weights, {}), 1e-12);
    }
  }
  EXPECT_TRUE(share_out(2, {1, 1, 1}).empty());
}

// A faster one never gets less than a slower one, and none gets nothing.
TEST(ShareOut, FollowsTheSpeeds) {
  std::mt19937 random(11);
  for (int round = 0; round < 1000; ++round) {
    std::vector<double> speeds(1 + random() % 12);
    for (double& speed : speeds) speed = 1e-3 * (1 + random() % 1000);
    const auto units = static_cast<int64_t>(speeds.size() + random() % 200);
    const auto shares = share_out(units, speeds);
    ASSERT_EQ(shares.size(), speeds.size());
    EXPECT_EQ(std::accumulate(shares.begin(), shares.end(), int64_t{0}), units);
    for (size_t i = 0; i < shares.size(); ++i) {
      EXPECT_GE(shares[i], 1);
      for (size_t j = 0; j < shares.size(); ++j) {
        EXPECT_TRUE(speeds[i] <= speeds[j] || shares[i] >= shares[j]);
      }
    }
    // The unit of speeds does not count.
    auto doubled = speeds;
    for (double& speed : doubled) speed *= 2;
    EXPECT_EQ(share_out(units, doubled), shares);
  }
}

}  // namespace echelon::partition_test
