// Each rule of device_sizes.h by itself: which devices count, and for how much.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "echelon/cluster/catalogue.h"
#include "echelon/cost/model_catalogue.h"
#include "echelon/cost/step_estimate.h"
#include "echelon/cost/strategy.h"
#include "echelon/layout/partition.h"
#include "echelon/planner/axis_orders.h"
#include "echelon/planner/device_sizes.h"
#include "tests/planner/search_job.h"

namespace echelon::planner::sized_parts_test {

using Cut = std::vector<int64_t>;

// A model for stages and batches of several sizes.
SearchJob job_on(const std::string& cluster) {
  return search_job("llama2-13b", cluster, 0);
}

// Seconds of a microbatch, forward and backward, on the slowest stage.
double
bottleneck(const SearchJob& job, cost::Strategy strategy, const Cut& cut) {
  strategy.stage_layers = cut;
  double most = 0;
  for (const auto& stage :
       cost::stage_times(job.model, strategy, job.cluster).stages) {
    most = std::max(most, stage.forward + stage.backward);
  }
  return most;
}

// A head with the weight of five blocks is on the fast device, then on the slow
// one.
TEST(SizedStages, TheHeadIsWorkOfTheLastStage) {
  for (const char* cluster :
       {"a100-80gb:1x1+h100-sxm:1x1", "h100-sxm:1x1+a100-80gb:1x1"}) {
    SearchJob job = search_job("gpt2", cluster, 0);
    job.model.transformer->layers = 36;
    const cost::Strategy strategy = strategy_of(job, {.pp = 2});
    const auto cuts = sized_stages(job, strategy);
    ASSERT_FALSE(cuts.empty()) << cluster;
    double least = 1e300;
    for (int64_t first = 1; first < 36; ++first) {
      least = std::min(least, bottleneck(job, strategy, {first, 36 - first}));
    }
    EXPECT_LT(bottleneck(job, strategy, cuts[0]), 1.05 * least)
        << cluster << ": " << cuts[0][0] << " blocks first";
  }
}

// Two pipelines: the first begins on the slow devices, the second has none.
TEST(SizedStages, TheSlowestOfAllPipelinesCountsAtEachPlace) {
  const SearchJob job = job_on("a100-80gb:1x8+h100-sxm:3x8");
  const auto cuts = sized_stages(
      job, strategy_of(job, {.dp_replicate = 2, .tp = 8, .pp = 2}));
  ASSERT_FALSE(cuts.empty());
  EXPECT_EQ(
      cuts[0], sized_stages(
                   job_on("a100-80gb:1x8+h100-sxm:1x8"),
                   strategy_of(job, {.tp = 8, .pp = 2}))[0]);
  // The first and the last pipeline have slow devices at one place each.
  const SearchJob both = job_on("a100-80gb:1x8+h100-sxm:2x8+a100-80gb:1x8");
  EXPECT_TRUE(
      sized_stages(
          both, strategy_of(both, {.dp_replicate = 2, .tp = 8, .pp = 2}))
          .empty());
}

// The stages go down the pipeline and up again, so the slow rank has the first
// and the last one.
TEST(SizedStages, AStageCountsTheDevicesOfItsRank) {
  const SearchJob job = job_on("a100-80gb:1x8+h100-sxm:1x8");
  cost::Strategy strategy = strategy_of(job, {.tp = 8, .pp = 2});
  strategy.schedule = ScheduleKind::zb_v;
  const auto cuts = sized_stages(job, strategy);
  ASSERT_FALSE(cuts.empty());
  ASSERT_EQ(cuts[0].size(), 4u);
  EXPECT_LT(cuts[0][0], cuts[0][1]);
  EXPECT_NEAR(cuts[0][1], cuts[0][2], 1);
  EXPECT_LE(cuts[0][3], cuts[0][0]);
}

// A device of a third of the memory has half the speed.
TEST(SizedStages, OneCutIsForTimeAndOneForMemory) {
  const auto job = search_job("llama3-8b", "a100-80gb:1x8+rtx-4090:1x8", 0);
  const auto cuts = sized_stages(job, strategy_of(job, {.tp = 8, .pp = 2}));
  ASSERT_EQ(cuts.size(), 2u);
  EXPECT_NE(cuts[0], cuts[1]);
  const double large = cost::usable_bytes(job.cluster.groups[0].node.device);
  const double small = cost::usable_bytes(job.cluster.groups[1].node.device);
  EXPECT_EQ(cuts[1], share_out(32, {large, small}));
  // The same partition is tried only once.
  SearchJob same = job;
  same.speeds = {1, small / large};
  same.model.transformer->vocab = 128;
  EXPECT_EQ(
      sized_stages(same, strategy_of(same, {.tp = 8, .pp = 2})),
      std::vector<Cut>{cuts[1]});
}

TEST(SizedStages, LayersOfImageNetworksAreCutByTheirWork) {
  const SearchJob job = search_job("resnet50", "a100-80gb:1x1+h100-sxm:1x1", 0);
  const auto cuts = sized_stages(job, strategy_of(job, {.pp = 2}));
  ASSERT_FALSE(cuts.empty());
  const auto flops = cost::flops_of_layers(job.model);
  const auto all = std::accumulate(flops.begin(), flops.end(), 0.0);
  const auto first =
      std::accumulate(flops.begin(), flops.begin() + cuts[0][0], 0.0);
  const double asked = job.speeds[0] / (job.speeds[0] + job.speeds[1]);
  EXPECT_LT(asked, 0.48);
  EXPECT_NEAR(first / all, asked, 0.03);
}

TEST(SizedStages, AreEqualWhereOnePipelineRankHasAllOrDevicesAreAlike) {
  const SearchJob job = job_on("a100-80gb:1x8+h100-sxm:1x8");
  EXPECT_TRUE(sized_stages(job, strategy_of(job, {.dp_replicate = 2, .tp = 8}))
                  .empty());
  // Pipelines within a node have devices of both kinds at each place.
  EXPECT_TRUE(
      sized_stages(job, strategy_of(job, {.dp_replicate = 2, .tp = 4, .pp = 2}))
          .empty());
}

TEST(DataRankSpeeds, AreThoseOfTheSlowestDeviceOfThePipeline) {
  const SearchJob job = job_on("a100-80gb:1x8+h100-sxm:3x8");
  EXPECT_EQ(
      data_rank_speeds(
          job, strategy_of(job, {.dp_replicate = 2, .tp = 8, .pp = 2})),
      (std::vector<double>{job.speeds[0], 1}));
  // The slow devices first or last in the pipeline.
  SearchJob last = job_on("h100-sxm:3x8+a100-80gb:1x8");
  EXPECT_EQ(
      data_rank_speeds(
          last, strategy_of(job, {.dp_shard = 2, .tp = 8, .pp = 2})),
      (std::vector<double>{1, last.speeds[1]}));
  // All pipelines cross both kinds: pp outermost.
  SearchJob half = search_job(
      "llama2-13b", "a100-80gb:2x8+h100-sxm:2x8", 0, "megatron-core");
  cost::Strategy across =
      strategy_of(half, {.dp_replicate = 2, .tp = 8, .pp = 2});
  across.layout.order = axis_orders()[1];
  EXPECT_TRUE(data_rank_speeds(half, across).empty());
}

TEST(DataRankSpeeds, AreNotGivenWhereRanksOfExpertsHaveBatchesOfTheirOwn) {
  const SearchJob job = search_job(
      "mixtral-8x7b", "a100-80gb:1x8+h100-sxm:1x8", 0, "megatron-core");
  EXPECT_FALSE(
      data_rank_speeds(job, strategy_of(job, {.dp_replicate = 16})).empty());
  EXPECT_TRUE(
      data_rank_speeds(job, strategy_of(job, {.dp_replicate = 2, .ep = 8}))
          .empty());
}

// Seconds of a sample on one device, by the estimate of a whole step.
double seconds_alone(
    const cost::ModelShape& model, const char* device, int64_t seq_len,
    cluster::Precision precision, const std::string& framework) {
  cost::Strategy alone;
  alone.global_batch = 1;
  alone.seq_len = seq_len;
  alone.precision = precision;
  alone.framework = framework;
  double seconds = 0;
  for (const auto& stage :
       cost::stage_times(model, alone, cluster::find_cluster(device)).stages) {
    seconds += stage.forward + stage.backward;
  }
  return seconds;
}

TEST(SizedBatches, AreTriedWithEveryNumberOfMicrobatches) {
  const auto job = search_job("llama2-7b", "a100-80gb:1x8+h100-sxm:1x8", 96);
  std::set<int64_t> counts;
  for (const cost::Strategy& group : list_groups(job)) {
    if (group.rank_microbatch.empty()) continue;
    EXPECT_EQ(group.round_samples() * group.num_microbatches(), 96);
    counts.insert(group.num_microbatches());
  }
  for (const int64_t count : {1, 2, 3, 4, 8, 12}) {
    EXPECT_TRUE(counts.contains(count)) << count;
  }
}

TEST(DeviceSpeeds, AreOfThisModelSequencePrecisionAndFramework) {
  const cost::ModelShape model = cost::find_model("llama2-7b");
  const cluster::Cluster cluster =
      cluster::find_cluster("a100-80gb:1x8+h100-sxm:1x8");
  struct Case {
    int64_t seq_len;
    cluster::Precision precision;
    const char* framework;
  };
  std::vector<double> ratios;
  for (const Case& one :
       {Case{4096, cluster::Precision::bf16, "echelon"},
        Case{32768, cluster::Precision::bf16, "echelon"},
        Case{4096, cluster::Precision::fp32, "echelon"},
        Case{4096, cluster::Precision::bf16, "megatron-2021"}}) {
    const auto speeds = device_speeds(
        model, cluster, one.seq_len, one.precision, one.framework);
    ASSERT_EQ(speeds.size(), 2u);
    EXPECT_EQ(speeds[1], 1);
    const auto seconds = [&](const char* device) {
      return seconds_alone(
          model, device, one.seq_len, one.precision, one.framework);
    };
    EXPECT_NEAR(
        speeds[0], seconds("h100-sxm:1") / seconds("a100-80gb:1"), 1e-3);
    ratios.push_back(speeds[0]);
  }
  // No two of the four ratios are equal.
  std::ranges::sort(ratios);
  for (size_t i = 1; i < ratios.size(); ++i) {
    EXPECT_GT(ratios[i], ratios[i - 1] * 1.01);
  }
}

// Half a percent is none, a tenth is some.
TEST(DeviceSpeeds, DifferencesThatNobodyMeasuresAreNone) {
  const cost::ModelShape model = cost::find_model("llama2-7b");
  cluster::Cluster cluster =
      cluster::find_cluster("a100-80gb:1x8+a100-80gb:1x4");
  const auto speeds = [&](double clock) {
    cluster::Cluster other = cluster;
    cluster::Device& device = other.groups[1].node.device;
    for (auto& peak : device.peak_flops_per_second) peak *= clock;
    device.memory_bytes_per_second *= clock;
    return device_speeds(
        model, other, 4096, cluster::Precision::bf16, "echelon");
  };
  EXPECT_TRUE(speeds(1.002).empty());
  EXPECT_EQ(speeds(1.1).size(), 2u);
}

}  // namespace echelon::planner::sized_parts_test
