#include "echelon/cost/overlap.h"

#include <gtest/gtest.h>

#include <vector>

namespace echelon {
namespace {

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

TEST(Overlap, GradientsTrailTheirLayersAsWhenEachIsFollowed) {
  for (const auto& pass : kPasses) {
    TrailingCollectives gradients;
    for (const Layer& one : pass) {
      gradients.add(one.computation, one.communication, one.repeat);
    }
    EXPECT_NEAR(gradients.exposed(), trailing(pass), 1e-12);
  }
}

TEST(Overlap, ParametersLeadTheirLayersAsWhenEachIsFollowed) {
  for (const auto& pass : kPasses) {
    LeadingCollectives parameters;
    for (const Layer& one : pass) {
      parameters.add(one.computation, one.communication, one.repeat);
    }
    EXPECT_NEAR(parameters.exposed(), leading(pass), 1e-12);
  }
}

TEST(Overlap, TheLastLayersGradientsAreNeverHidden) {
  TrailingCollectives gradients;
  gradients.add(10, 1, 12);
  gradients.add(0, 4);  // a large embedding
  EXPECT_NEAR(gradients.exposed(), 5, 1e-12);
}

}  // namespace
}  // namespace echelon
