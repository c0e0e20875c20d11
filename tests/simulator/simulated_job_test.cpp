#include "echelon/simulator/simulated_job.h"

#include <gtest/gtest.h>

#include <map>

#include "echelon/cluster/catalogue.h"
#include "echelon/cost/model_catalogue.h"

namespace echelon::simulator::simulated_job_test {

ModelJob job_of(const Layout& layout, const std::string& cluster) {
  const cost::Strategy strategy{.layout = layout, .global_batch = 32};
  return make_job(
      cost::find_model("gpt2"), strategy, cluster::find_cluster(cluster), {});
}

// Tells for each axis whether a group's links may carry anything else at the
// same time.
std::map<AxisMask, bool> shared_of(const ModelJob& job) {
  std::map<AxisMask, bool> shared;
  const auto& classes = job.job.classes;
  for (size_t i = 0; i < classes.groups.size(); ++i) {
    shared[classes.groups[i].axes] = job.job.group_shares[i];
  }
  return shared;
}

constexpr AxisMask kTensor = mask_of(Axis::tp);
constexpr AxisMask kData = mask_of(Axis::dp_replicate);

TEST(SimulatedJob, CollectivesInLineAreAloneUntilMessagesGoTheirWay) {
  EXPECT_FALSE(shared_of(job_of({.tp = 8}, "h100-sxm:1x8")).at(kTensor));
  // Messages between nodes are not on the links inside.
  EXPECT_FALSE(
      shared_of(job_of({.tp = 8, .pp = 2}, "h100-sxm:2x8")).at(kTensor));
  EXPECT_TRUE(
      shared_of(job_of({.tp = 4, .pp = 2}, "h100-sxm:1x8")).at(kTensor));
}

TEST(SimulatedJob, WhatIsLaunchedBesideSharesItsLinksWithWhatIsInLine) {
  const auto inside =
      shared_of(job_of({.dp_replicate = 2, .tp = 4}, "h100-sxm:1x8"));
  EXPECT_TRUE(inside.at(kData));
  EXPECT_TRUE(inside.at(kTensor));
  const auto apart =
      shared_of(job_of({.dp_replicate = 2, .tp = 8}, "h100-sxm:2x8"));
  EXPECT_TRUE(apart.at(kData));
  EXPECT_FALSE(apart.at(kTensor));
}

}  // namespace echelon::simulator::simulated_job_test
