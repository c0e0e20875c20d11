#include "echelon/train/batch_division.h"

#include <gmock/gmock.h>

#include <numeric>
#include <random>

#include "echelon/layout/mesh.h"

namespace echelon::batch_division_test {

using testing::ElementsAre;

// Ranks that take so many seconds for each of their samples.
std::vector<double> work_of(
    const BatchDivision& division, const std::vector<double>& seconds,
    double fixed = 0) {
  std::vector<double> work;
  for (size_t i = 0; i < seconds.size(); ++i) {
    work.push_back(
        fixed + seconds[i] * static_cast<double>(division.samples()[i]));
  }
  return work;
}

class Divided : public testing::Test {
 protected:
  // Steps with these times; returns the changes.
  std::vector<timeline::Rebalance>
  train(int64_t steps, const std::vector<double>& seconds, double fixed = 0) {
    std::vector<timeline::Rebalance> changes;
    for (int64_t i = 0; i < steps; ++i) {
      const auto change =
          division_.after_step(++step_, work_of(division_, seconds, fixed));
      if (change) changes.push_back(*change);
    }
    return changes;
  }

  BatchDivision division_{
      Mesh({.dp_replicate = 2}), {32, 32}, /*unit=*/1, /*every=*/4};
  int64_t step_ = 0;
};

TEST_F(Divided, BySpeedAfterTheFirstSteps) {
  EXPECT_TRUE(train(5, {1, 3}).empty());
  const auto changes = train(1, {1, 3});
  ASSERT_EQ(changes.size(), 1u);
  EXPECT_EQ(
      changes[0], (timeline::Rebalance{
                      .step = 6,
                      .before = {32, 32},
                      .seconds = {32, 96},
                      .after = {48, 16}}));
  EXPECT_EQ(changes[0].slowest_before(), 96);
  EXPECT_EQ(changes[0].slowest_after(), 48);
  EXPECT_THAT(division_.samples(), ElementsAre(48, 16));
  EXPECT_TRUE(train(100, {1, 3}).empty());  // it stays
}

TEST_F(Divided, AgainWhenSpeedsChange) {
  EXPECT_EQ(train(20, {1, 3}).size(), 1u);
  const auto changes = train(20, {3, 1});
  ASSERT_EQ(changes.size(), 1u);
  EXPECT_THAT(changes[0].before, ElementsAre(48, 16));
  EXPECT_THAT(changes[0].after, ElementsAre(16, 48));
  EXPECT_THAT(train(20, {1, 1}).back().after, ElementsAre(32, 32));
}

TEST_F(Divided, NotForLittle) {
  EXPECT_TRUE(train(100, {1, 1.09}).empty());
  EXPECT_EQ(train(100, {1, 1.15}).size(), 1u);
}

// Neither a pause nor the steps that allocate memory count.
TEST_F(Divided, NotForOneStep) {
  division_.after_step(1, {1, 100});
  division_.after_step(2, {1, 100});
  for (int64_t step = 3; step < 100; ++step) {
    const double pause = step % 4 == 0 ? 50 : 1;
    EXPECT_FALSE(division_.after_step(step, {1, pause}));
  }
}

// Of a rank's time, half does not depend on its samples: the second decision
// comes closer, and then it stays.
TEST_F(Divided, TimesThatAreNotInProportion) {
  const auto changes = train(200, {1, 3}, 32);
  ASSERT_GE(changes.size(), 2u);
  EXPECT_LE(changes.size(), 4u);
  const auto work = work_of(division_, {1, 3}, 32);
  EXPECT_NEAR(work[0], work[1], 0.1 * work[0]);
}

TEST_F(Divided, ARankWithoutWorkIsNoMeasurement) {
  EXPECT_TRUE(train(20, {1, 0}).empty());
  EXPECT_EQ(train(20, {1, 3}).size(), 1u);
}

// Ranks that compute a data-parallel rank's samples together are as slow as the
// slowest of them; passes divide its samples.
TEST(BatchDivision, OfOtherAxesAndPasses) {
  const Mesh mesh({.dp_replicate = 2, .dp_shard = 2, .pp = 2});
  BatchDivision division(mesh, {24, 24, 24, 24}, 8, 1);
  std::vector<double> work(8, 10);
  for (int64_t rank = 0; rank < 8; ++rank) {
    const bool slow = mesh.data_index(rank) == 2;
    if (slow && mesh.coordinate(rank, Axis::pp) == 1) {
      work[static_cast<size_t>(rank)] = 30;
    }
  }
  division.after_step(1, work);
  division.after_step(2, work);
  const auto change = division.after_step(3, work);
  ASSERT_TRUE(change);
  EXPECT_THAT(change->seconds, ElementsAre(10, 10, 30, 10));
  EXPECT_THAT(change->after, ElementsAre(32, 32, 8, 24));
}

TEST(BatchDivision, GoesOnWithWhatFits) {
  BatchDivision division(Mesh({.dp_replicate = 2}), {32, 32}, 4, 1);
  for (const auto& other : std::vector<std::vector<int64_t>>{
           {}, {64}, {48, 48}, {16, 16, 32}, {64, 0}, {30, 34}, {68, -4}}) {
    EXPECT_FALSE(division.resume(other));
    EXPECT_THAT(division.samples(), ElementsAre(32, 32));
  }
  EXPECT_TRUE(division.resume({44, 20}));
  EXPECT_THAT(division.samples(), ElementsAre(44, 20));
}

// Whatever ranks take: the batch stays whole, in units, and the slowest is
// never expected to take longer.
TEST(BatchDivision, OfAnyTimes) {
  std::mt19937 random(3);
  int changes = 0;
  for (int round = 0; round < 300; ++round) {
    const int64_t ranks = 2 + static_cast<int64_t>(random() % 6);
    const int64_t unit = 1 + static_cast<int64_t>(random() % 4);
    BatchDivision division(
        Mesh({.dp_shard = ranks}),
        std::vector<int64_t>(static_cast<size_t>(ranks), 8 * unit), unit, 3);
    for (int64_t step = 1; step < 60; ++step) {
      std::vector<double> work;
      for (int64_t i = 0; i < ranks; ++i) {
        work.push_back(1e-3 * (1 + random() % 1000));
      }
      const auto change = division.after_step(step, work);
      if (!change) continue;
      ++changes;
      EXPECT_EQ(change->after, division.samples());
      EXPECT_LT(change->slowest_after(), change->slowest_before());
    }
    int64_t sum = 0;
    for (const int64_t samples : division.samples()) {
      EXPECT_GE(samples, unit);
      EXPECT_EQ(samples % unit, 0);
      sum += samples;
    }
    EXPECT_EQ(sum, 8 * unit * ranks);
  }
  EXPECT_GT(changes, 300);
}

}  // namespace echelon::batch_division_test
