#include "echelon/data/sources/order.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "echelon/data/sources/random.h"
#include "tests/support/error_text.h"

namespace echelon::order_test {

using testing::ElementsAre;
using testing::HasSubstr;

std::vector<int64_t> first(int64_t n) {
  std::vector<int64_t> values(static_cast<size_t>(n));
  std::iota(values.begin(), values.end(), 0);
  return values;
}

TEST(Random, IsTheSameOnEveryPlatform) {
  // splitmix64's published first output for state 0, by way of its finaliser.
  EXPECT_EQ(mix_bits(0x9e3779b97f4a7c15u), 0xe220a8397b1dcdafu);
  EXPECT_THAT(
      epoch_order(first(10), 1, 0, true),
      ElementsAre(9, 5, 6, 3, 2, 0, 8, 1, 4, 7));
}

TEST(Random, BelowIsUniform) {
  RandomStream random(RandomUse::order, {7});
  std::vector<int> count(6, 0);
  for (int i = 0; i < 60000; ++i) ++count[random.below(6)];
  // 10,000 each; 500 is more than five standard deviations.
  for (const int n : count) EXPECT_NEAR(n, 10000, 500);
  for (int i = 0; i < 1000; ++i) {
    const double value = random.uniform();
    EXPECT_TRUE(value >= 0.0 && value < 1.0);
  }
}

TEST(Order, EveryOrderIsAsLikely) {
  std::map<std::vector<int64_t>, int> count;
  for (int64_t epoch = 0; epoch < 24000; ++epoch) {
    ++count[epoch_order(first(4), 3, epoch, true)];
  }
  EXPECT_EQ(count.size(), 24);
  for (const auto& [order, n] : count) EXPECT_NEAR(n, 1000, 180);
}

TEST(Order, DependsOnSeedAndEpochAndKeepsEverySample) {
  const auto base = epoch_order(first(100), 0, 0, true);
  EXPECT_EQ(base, epoch_order(first(100), 0, 0, true));
  EXPECT_NE(base, epoch_order(first(100), 0, 1, true));
  EXPECT_NE(base, epoch_order(first(100), 1, 0, true));
  EXPECT_NE(
      epoch_order(first(100), 0, 1, true), epoch_order(first(100), 1, 0, true));
  auto sorted = base;
  std::sort(sorted.begin(), sorted.end());
  EXPECT_EQ(sorted, first(100));
  EXPECT_EQ(epoch_order(first(100), 0, 3, false), first(100));
  EXPECT_TRUE(epoch_order({}, 0, 0, true).empty());
}

TEST(Split, HoldsOutPartOfTheSamples) {
  const Split split = split_samples(1797, 0.2, 0);
  EXPECT_EQ(split.train.size(), 1438);
  EXPECT_EQ(split.holdout.size(), 359);
  auto all = split.train;
  all.insert(all.end(), split.holdout.begin(), split.holdout.end());
  EXPECT_TRUE(std::is_sorted(split.train.begin(), split.train.end()));
  EXPECT_TRUE(std::is_sorted(split.holdout.begin(), split.holdout.end()));
  std::sort(all.begin(), all.end());
  EXPECT_EQ(all, first(1797));
  EXPECT_NE(split.holdout, split_samples(1797, 0.2, 1).holdout);
  EXPECT_EQ(split_samples(10, 0.0, 0).train, first(10));
}

TEST(Split, KeepsOneSampleEachWay) {
  EXPECT_EQ(num_holdout(2, 0.001), 1);
  EXPECT_EQ(num_holdout(2, 0.999), 1);
  EXPECT_EQ(num_holdout(1, 0.5), 0);
  EXPECT_EQ(num_holdout(0, 0.5), 0);
  EXPECT_THAT(
      error_text([] { num_holdout(9, 1.0); }), HasSubstr("less than 1"));
  EXPECT_THAT(error_text([] { num_holdout(9, -0.1); }), HasSubstr("0 or more"));
}

TEST(Share, SlicesFollowEachOtherAndAddUp) {
  for (int64_t ranks : {1, 2, 3, 4, 7}) {
    for (const auto& sizes : std::vector<std::vector<int64_t>>{
             {}, std::vector<int64_t>(static_cast<size_t>(ranks), 5), [&] {
               auto ascending = first(ranks);
               ascending.back() += 1;
               return ascending;
             }()}) {
      for (int64_t n : {0, 1, 2, 5, 64, 1000}) {
        int64_t end = 0;
        for (int64_t rank = 0; rank < ranks; ++rank) {
          const Share share = rank_share(n, rank, ranks, sizes);
          EXPECT_EQ(share.begin, end);
          EXPECT_GE(share.size(), 0);
          end = share.end;
        }
        EXPECT_EQ(end, n);
      }
    }
  }
}

TEST(Share, AFullBatchGivesEachRankItsNumber) {
  const std::vector<int64_t> sizes = {48, 0, 16};
  EXPECT_EQ(rank_share(64, 0, 3, sizes), (Share{0, 48}));
  EXPECT_EQ(rank_share(64, 1, 3, sizes).size(), 0);
  EXPECT_EQ(rank_share(64, 2, 3, sizes), (Share{48, 64}));
  // Half a batch: half of each.
  EXPECT_EQ(rank_share(32, 0, 3, sizes), (Share{0, 24}));
  EXPECT_EQ(rank_share(32, 2, 3, sizes), (Share{24, 32}));
  EXPECT_EQ(rank_share(64, 1, 4), (Share{16, 32}));
}

TEST(Share, RefusesWrongArguments) {
  const std::vector<int64_t> negative = {3, -1}, zero = {0, 0},
                             three = {1, 1, 1};
  const auto refused = [](int64_t rank, std::span<const int64_t> sizes) {
    return error_text<ConfigError>([&] { rank_share(8, rank, 2, sizes); });
  };
  EXPECT_THAT(refused(2, {}), HasSubstr("rank 2 is outside of 2 ranks"));
  EXPECT_THAT(refused(0, negative), HasSubstr("holds -1"));
  EXPECT_THAT(refused(0, zero), HasSubstr("sum is 0"));
  EXPECT_THAT(refused(0, three), HasSubstr("3 numbers for 2"));
}

TEST(Blend, CountsAddUp) {
  EXPECT_THAT(
      blend_counts(10, std::vector<double>{1, 1, 1}),
      testing::ElementsAre(4, 3, 3));
  EXPECT_THAT(
      blend_counts(100, std::vector<double>{0.7, 0.3}),
      testing::ElementsAre(70, 30));
  EXPECT_THROW(blend_counts(2, std::vector<double>{1, 1, 1}), ConfigError);
}

TEST(Blend, AnyPrefixKeepsTheProportions) {
  for (const auto& counts : std::vector<std::vector<int64_t>>{
           {1, 1}, {7, 3}, {1, 1, 1, 1}, {50, 3, 17, 1}, {97, 1, 1, 1}, {5}}) {
    const int64_t total =
        std::accumulate(counts.begin(), counts.end(), int64_t{0});
    std::vector<std::vector<int64_t>> sources;
    for (size_t s = 0; s < counts.size(); ++s) {
      sources.push_back({static_cast<int64_t>(s)});
    }
    const auto order = blend_order(sources, counts, 1, 0, true);
    ASSERT_EQ(static_cast<int64_t>(order.size()), total);
    std::vector<int64_t> taken(counts.size());
    for (int64_t k = 1; k <= total; ++k) {
      ++taken[static_cast<size_t>(order[static_cast<size_t>(k - 1)])];
      for (size_t s = 0; s < counts.size(); ++s) {
        EXPECT_LT(std::abs(taken[s] * total - k * counts[s]), total)
            << "source " << s << " of " << counts.size() << " after " << k;
      }
    }
    EXPECT_EQ(taken, counts);
  }
}

TEST(Blend, ASourceContinuesInTheNextEpoch) {
  const std::vector<std::vector<int64_t>> sources = {{0, 1, 2, 3, 4}, {9}};
  const std::vector<int64_t> counts = {3, 1};
  for (const bool shuffle : {false, true}) {
    std::vector<int64_t> seen;
    for (int64_t epoch = 0; epoch < 5; ++epoch) {
      for (const int64_t sample :
           blend_order(sources, counts, 3, epoch, shuffle)) {
        if (sample != 9) seen.push_back(sample);
      }
    }
    ASSERT_EQ(seen.size(), 15);
    for (auto pass = seen.begin(); pass != seen.end(); pass += 5) {
      const std::vector<int64_t> one(pass, pass + 5);
      EXPECT_THAT(one, testing::UnorderedElementsAre(0, 1, 2, 3, 4));
      if (!shuffle) {
        EXPECT_THAT(one, testing::ElementsAre(0, 1, 2, 3, 4));
      }
    }
  }
  EXPECT_NE(
      blend_order(sources, std::vector<int64_t>{500, 1}, 3, 0, true),
      blend_order(sources, std::vector<int64_t>{500, 1}, 4, 0, true));
}

}  // namespace echelon::order_test
