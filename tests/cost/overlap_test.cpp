#include "echelon/cost/rank_times.h"

#include <gtest/gtest.h>

#include <vector>

namespace echelon::cost::overlap_test {

struct Layer {
  double computation;
  double communication;
  int64_t repeat;
};

// The same, layer after layer.
double trailing(const std::vector<Layer>& layers) {
  double now = 0, over = 0;
  for (const Layer& layer : layers) {
    for (int64_t i = 0; i < layer.repeat; ++i) {
      now += layer.computation;
      over = std::max(over, now) + layer.communication;
    }
  }
  return std::max(0.0, over - now);
}

// A layer's collective begins with the layer before it.
double leading(const std::vector<Layer>& layers) {
  double now = 0, begun = 0, waited = 0;
  for (const Layer& layer : layers) {
    for (int64_t i = 0; i < layer.repeat; ++i) {
      const double there = begun + layer.communication;
      if (there > now) waited += there - now;
      now = std::max(now, there);
      begun = now;
      now += layer.computation;
    }
  }
  return waited;
}

const std::vector<std::vector<Layer>> kPasses = {
    {{1, 0.5, 1}},
    {{1, 0.5, 10}},
    {{0.5, 1, 10}},
    {{0, 4, 1}, {1, 0.5, 12}, {2, 3, 1}},
    {{2, 3, 1}, {1, 0.5, 12}, {0, 4, 1}},
    {{1, 2, 3}, {3, 1, 2}, {1, 1, 7}, {0.1, 6, 1}, {2, 0, 4}},
    {{0, 1, 2}, {0, 0, 3}}};

template <class Collectives>
double exposed(Collectives collectives, const std::vector<Layer>& pass) {
  for (const Layer& one : pass) {
    collectives.add(one.computation, one.communication, one.repeat);
  }
  return collectives.exposed();
}

TEST(Overlap, CollectivesTrailAndLeadTheirLayersAsWhenEachIsFollowed) {
  for (const auto& pass : kPasses) {
    EXPECT_NEAR(exposed(TrailingCollectives(), pass), trailing(pass), 1e-12);
    EXPECT_NEAR(exposed(LeadingCollectives(), pass), leading(pass), 1e-12);
  }
}

TEST(Overlap, CollectivesThatAreAllOnTheirWayHoldUpWhomTheyDoNotReach) {
  QueuedCollectives late(0);
  late.add(1, 3, 2);  // there at 3 and 6: waits 3, then 2
  late.add(10, 1);    // there at 7, the layers before it end then
  late.add(1, 5);     // there at 12, at 17 nobody waits
  EXPECT_DOUBLE_EQ(late.exposed(), 5);

  // Half a second of slowing for each second that is hidden: a wait of 2, then
  // none and 1 s hidden twice.
  QueuedCollectives slowing(0.5);
  slowing.add(4, 2);
  slowing.add(4, 1, 2);
  EXPECT_DOUBLE_EQ(slowing.exposed(), 2 + 0.5 + 0.5);

  // No collective ends later than if it began with the layer before it.
  for (const auto& pass : kPasses) {
    EXPECT_LE(exposed(QueuedCollectives(0), pass), leading(pass) + 1e-12);
  }
}

TEST(Overlap, TheLastLayersGradientsAreNeverHidden) {
  TrailingCollectives gradients;
  gradients.add(10, 1, 12);
  gradients.add(0, 4);  // a large embedding
  EXPECT_NEAR(gradients.exposed(), 5, 1e-12);
}

}  // namespace echelon::cost::overlap_test
