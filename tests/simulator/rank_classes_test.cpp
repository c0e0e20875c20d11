#include "echelon/simulator/rank_classes.h"

#include <gmock/gmock.h>

namespace echelon::simulator::rank_classes_test {

using testing::ElementsAre;

constexpr AxisMask kTensor = mask_of(Axis::tp);
constexpr AxisMask kData = mask_of(Axis::dp_replicate);

// Neighbours in a pipeline that is no ring.
RankColours plain(const Mesh& mesh) {
  RankColours colours;
  colours.axes = {kTensor, kData};
  const int64_t pp = mesh.layout().pp;
  colours.pipeline.resize(static_cast<size_t>(pp));
  for (int64_t p = 0; p + 1 < pp; ++p) {
    colours.pipeline[static_cast<size_t>(p)].push_back(p + 1);
    colours.pipeline[static_cast<size_t>(p + 1)].push_back(p);
  }
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    colours.of_rank.push_back(
        static_cast<uint64_t>(mesh.coordinate(rank, Axis::pp)));
  }
  return colours;
}

TEST(RankClasses, EqualReplicasAreOneClassForEachStage) {
  const Mesh mesh({.dp_replicate = 8, .tp = 4, .pp = 2});
  const RankClasses all = find_classes(mesh, plain(mesh), true);
  ASSERT_EQ(all.classes.size(), 2u);
  EXPECT_EQ(all.classes[0].ranks, 32);
  EXPECT_THAT(all.classes[0].neighbours, ElementsAre(0, 1));
  EXPECT_EQ(all.groups.size(), 4u);  // tp and dp of each stage
  EXPECT_THAT(all.groups[0].members, ElementsAre(0));
}

TEST(RankClasses, WithoutSymmetryEachRankIsOne) {
  const Mesh mesh({.dp_replicate = 2, .tp = 2, .pp = 2});
  const RankClasses all = find_classes(mesh, plain(mesh), false);
  EXPECT_EQ(all.classes.size(), 8u);
  EXPECT_THAT(all.groups[0].members, ElementsAre(0, 1));
}

TEST(RankClasses, AStragglerSplitsWhomItTouchesAlone) {
  const Mesh mesh({.dp_replicate = 64, .tp = 8, .pp = 4});
  RankColours colours = plain(mesh);
  colours.of_rank[100] = 99;
  const RankClasses all = find_classes(mesh, colours, true);
  // In each of four stages, ranks differ by whether they are in the straggler's
  // replica and at its place along tp. The straggler's own class has no other
  // rank.
  EXPECT_EQ(all.classes.size(), 16u);
  int64_t ranks = 0;
  for (const auto& one : all.classes) ranks += one.ranks;
  EXPECT_EQ(ranks, mesh.size());
  EXPECT_EQ(all.classes[static_cast<size_t>(all.class_of[100])].ranks, 1);
}

TEST(RankClasses, MembersOfAGroupAreTheSameWhoeverOfAClassIsAsked) {
  const Mesh mesh({.dp_replicate = 6, .tp = 4, .pp = 3});
  RankColours colours = plain(mesh);
  colours.of_rank[5] = 77;
  colours.of_rank[40] = 78;
  const RankClasses all = find_classes(mesh, colours, true);
  for (size_t axes = 0; axes < all.axes.size(); ++axes) {
    for (int64_t rank = 0; rank < mesh.size(); ++rank) {
      std::vector<int32_t> members;
      for (const int other : mesh.ranks_along(rank, axes_of(all.axes[axes]))) {
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

}  // namespace echelon::simulator::rank_classes_test
