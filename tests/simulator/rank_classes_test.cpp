#include "echelon/simulator/rank_classes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace echelon::simulator {
namespace rank_classes_test {

using testing::ElementsAre;

constexpr AxisMask kTensor = mask_of(Axis::tp);
constexpr AxisMask kData = mask_of(Axis::dp_replicate);

// Neighbours in a pipeline that is no ring.
RankColours plain(const RankGrid& grid) {
  RankColours colours;
  colours.axes = {kTensor, kData};
  const int64_t pp = grid.degree(Axis::pp);
  colours.pipeline.resize(static_cast<size_t>(pp));
  for (int64_t p = 0; p + 1 < pp; ++p) {
    colours.pipeline[static_cast<size_t>(p)].push_back(p + 1);
    colours.pipeline[static_cast<size_t>(p + 1)].push_back(p);
  }
  for (int64_t rank = 0; rank < grid.size(); ++rank) {
    colours.of_rank.push_back(
        static_cast<uint64_t>(grid.coordinate(rank, Axis::pp)));
  }
  return colours;
}

TEST(RankGrid, FollowsTheOrderOfTheAxes) {
  Layout layout{.dp_replicate = 2, .tp = 2, .pp = 3};
  const RankGrid usual(layout);
  EXPECT_EQ(usual.size(), 12);
  EXPECT_EQ(usual.coordinate(7, Axis::tp), 1);
  EXPECT_EQ(usual.coordinate(7, Axis::pp), 0);
  EXPECT_EQ(usual.coordinate(7, Axis::dp_replicate), 1);
  EXPECT_THAT(usual.group(7, kData), ElementsAre(1, 7));
  EXPECT_EQ(usual.moved(7, Axis::pp, 2), 11);
  layout.order = {Axis::pp, Axis::dp_replicate, Axis::dp_shard,
                  Axis::cp, Axis::ep,           Axis::tp};
  const RankGrid outer(layout);
  EXPECT_EQ(outer.coordinate(7, Axis::pp), 1);
  EXPECT_THAT(outer.group(7, kData), ElementsAre(5, 7));
  EXPECT_THAT(outer.group(7, kData | kTensor), ElementsAre(4, 5, 6, 7));
}

TEST(RankClasses, EqualReplicasAreOneClassForEachStage) {
  const RankGrid grid({.dp_replicate = 8, .tp = 4, .pp = 2});
  const RankClasses all = find_classes(grid, plain(grid), true);
  ASSERT_EQ(all.classes.size(), 2u);
  EXPECT_EQ(all.classes[0].ranks, 32);
  EXPECT_THAT(all.classes[0].neighbours, ElementsAre(0, 1));
  EXPECT_EQ(all.groups.size(), 4u);  // tp and dp of each stage
  EXPECT_THAT(all.groups[0].members, ElementsAre(0));
}

TEST(RankClasses, WithoutSymmetryEachRankIsOne) {
  const RankGrid grid({.dp_replicate = 2, .tp = 2, .pp = 2});
  const RankClasses all = find_classes(grid, plain(grid), false);
  EXPECT_EQ(all.classes.size(), 8u);
  EXPECT_THAT(all.groups[0].members, ElementsAre(0, 1));
}

TEST(RankClasses, AStragglerSplitsWhomItTouchesAlone) {
  const RankGrid grid({.dp_replicate = 64, .tp = 8, .pp = 4});
  RankColours colours = plain(grid);
  colours.of_rank[100] = 99;
  const RankClasses all = find_classes(grid, colours, true);
  // By stage: in its replica or not, at its place along tp or not. The
  // straggler itself is told from nobody else at its place.
  EXPECT_EQ(all.classes.size(), 16u);
  int64_t ranks = 0;
  for (const auto& one : all.classes) ranks += one.ranks;
  EXPECT_EQ(ranks, grid.size());
  EXPECT_EQ(all.classes[static_cast<size_t>(all.class_of[100])].ranks, 1);
}

TEST(RankClasses, MembersOfAGroupAreTheSameWhoeverOfAClassIsAsked) {
  const RankGrid grid({.dp_replicate = 6, .tp = 4, .pp = 3});
  RankColours colours = plain(grid);
  colours.of_rank[5] = 77;
  colours.of_rank[40] = 78;
  const RankClasses all = find_classes(grid, colours, true);
  for (size_t axes = 0; axes < all.axes.size(); ++axes) {
    for (int64_t rank = 0; rank < grid.size(); ++rank) {
      std::vector<int32_t> members;
      for (const int64_t other : grid.group(rank, all.axes[axes])) {
        members.push_back(all.class_of[static_cast<size_t>(other)]);
      }
      std::sort(members.begin(), members.end());
      members.erase(std::unique(members.begin(), members.end()), members.end());
      const auto& own = all.classes[static_cast<size_t>(
          all.class_of[static_cast<size_t>(rank)])];
      EXPECT_EQ(
          all.groups[static_cast<size_t>(own.groups[axes])].members, members);
    }
  }
}

}  // namespace rank_classes_test
}  // namespace echelon::simulator
