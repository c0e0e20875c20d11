// How steps spend their time, for which ranks others wait, and what the passes
// of a pipeline take.
#include "echelon/explain/findings.h"

#include <gmock/gmock.h>

#include "echelon/cluster/catalogue.h"
#include "echelon/cost/model_catalogue.h"
#include "echelon/simulator/simulate.h"

namespace echelon::explain::run_times_test {

using testing::ElementsAre;

timeline::Span
call(int32_t rank, const std::string& axis, int64_t begin, int64_t end) {
  return {rank,
          "comm",
          "all_reduce x",
          timeline::SpanKind::communication,
          begin,
          end,
          0,
          8,
          axis};
}

TEST(LateRanks, AreLateInTheirOwnGroupAlone) {
  // Ranks 0 and 1, and 2 and 3, are groups of tp; rank 3 is late.
  timeline::Timeline timeline;
  for (int32_t rank = 0; rank < 4; ++rank) {
    timeline.spans.push_back(
        call(rank, "tp", rank == 3 ? 70 : 10 + rank, rank < 2 ? 20 : 80));
    timeline.spans.push_back(call(rank, "dp_replicate", 90, 95));
  }
  const Layout layout{.dp_replicate = 2, .tp = 2};
  const LateRanks late = late_ranks(timeline, layout);
  EXPECT_EQ(late.waits.at({0, 0}), (timeline::Intervals{{10, 11}}));
  EXPECT_EQ(late.waits.at({2, 0}), (timeline::Intervals{{12, 70}}));
  EXPECT_FALSE(late.waits.contains({1, 0}));
  EXPECT_FALSE(late.waits.contains({3, 0}));
  EXPECT_EQ(late.caused.at({3, 0}), (timeline::Intervals{{12, 70}}));
  // A timeline alone does not say which ranks form a group.
  EXPECT_TRUE(late_ranks(timeline, {}).waits.empty());
}

// Ranks of cp have parts of the same samples, and are in both groups.
TEST(LateRanks, RanksOfContextParallelismShardAndSumTogether) {
  for (const char* group : {"dp_shard", "dp"}) {
    timeline::Timeline timeline;
    for (int32_t rank = 0; rank < 4; ++rank) {
      timeline.spans.push_back(call(rank, group, 10 * rank, 50));
    }
    const LateRanks late = late_ranks(timeline, Layout{.dp_shard = 2, .cp = 2});
    for (int32_t rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(
          late.waits.at({rank, 0}), (timeline::Intervals{{10 * rank, 30}}))
          << group;
    }
    EXPECT_FALSE(late.waits.contains({3, 0}));
  }
}

// Ranks of ep shard and sum all but their experts together.
TEST(LateRanks, RanksOfExpertsAreTogetherForAllElse) {
  const Layout layout{.dp_shard = 2, .ep = 2};  // ranks 0 and 2 have the same
  const auto waits = [&](const char* group) {
    timeline::Timeline timeline;
    for (int32_t rank = 0; rank < 4; ++rank) {
      timeline.spans.push_back(call(rank, group, 10 * rank, 50));
    }
    return late_ranks(timeline, layout).waits;
  };
  for (const char* experts : {"dp_shard", "dp"}) {
    const auto own = waits(experts);
    EXPECT_EQ(own.size(), 2u) << experts;
    EXPECT_EQ(own.at({0, 0}), (timeline::Intervals{{0, 20}})) << experts;
    EXPECT_EQ(own.at({1, 0}), (timeline::Intervals{{10, 30}})) << experts;
  }
  for (const char* others : {"shard", "data"}) {
    const auto own = waits(others);
    EXPECT_EQ(own.size(), 3u) << others;
    EXPECT_EQ(own.at({0, 0}), (timeline::Intervals{{0, 30}})) << others;
    EXPECT_EQ(own.at({2, 0}), (timeline::Intervals{{20, 30}})) << others;
  }
}

TEST(LateRanks, CallsOfOneNameAreToldByTheirOrder) {
  timeline::Timeline timeline;
  for (const int64_t begin : {0, 100}) {
    timeline.spans.push_back(call(0, "dp_replicate", begin, begin + 50));
    timeline.spans.push_back(call(1, "dp_replicate", begin + 30, begin + 50));
  }
  const LateRanks late = late_ranks(timeline, {});
  EXPECT_EQ(late.waits.at({0, 0}), (timeline::Intervals{{0, 30}, {100, 130}}));
}

TEST(LateRanks, NobodyWaitsLongerThanItsOwnCall) {
  // A call that was left by a time-out, and one of messages.
  const timeline::Timeline timeline{
      .spans = {
          call(0, "dp_replicate", 0, 5), call(1, "dp_replicate", 8, 10),
          call(0, "pp", 20, 30), call(1, "pp", 28, 30)}};
  const LateRanks late = late_ranks(timeline, Layout{.dp_replicate = 2});
  EXPECT_EQ(late.waits.at({0, 0}), (timeline::Intervals{{0, 5}}));
  EXPECT_FALSE(late_ranks(
                   {.spans = {call(0, "pp", 20, 30), call(1, "pp", 28, 30)}},
                   Layout{.pp = 2})
                   .waits.contains({0, 0}));
}

timeline::Span pass(
    int32_t rank, const std::string& name, timeline::SpanKind kind,
    int64_t begin, int64_t end, const std::string& track = "compute") {
  return {rank, track, name, kind, begin, end, 0};
}

// Figures of the step are shared when the last stage has them.
TEST(RunTimes, WhoMeetsAtTheEndOfAPipelinesStepWaitsForStages) {
  const timeline::Timeline timeline{
      .spans = {
          pass(0, "0F0", timeline::SpanKind::forward, 0, 20),
          pass(0, "wait 1B0", timeline::SpanKind::communication, 20, 80),
          pass(0, "0B0", timeline::SpanKind::backward, 80, 120),
          pass(1, "1F0", timeline::SpanKind::forward, 20, 40),
          pass(1, "1B0", timeline::SpanKind::backward, 40, 80),
          call(0, "world", 120, 130), call(1, "world", 80, 130)}};
  const RunTimes times = run_times(timeline, Layout{.pp = 2});
  EXPECT_TRUE(times.pipeline);
  EXPECT_EQ(times.mean.for_ranks, 0);
  EXPECT_NEAR(times.ranks.at(1).mean.for_stages, 70e-9, 1e-15);
  EXPECT_NEAR(times.ranks.at(0).mean.for_stages, 70e-9, 1e-15);
}

TEST(RunTimes, TracksThatComputeAtOnceCountOnce) {
  const RunTimes times = run_times(
      {.spans =
           {pass(0, "forward", timeline::SpanKind::forward, 0, 10),
            pass(
                0, "backward", timeline::SpanKind::backward, 5, 15,
                "device 1")}},
      {});
  EXPECT_NEAR(times.mean.forward, 10e-9, 1e-18);
  EXPECT_NEAR(times.mean.backward, 5e-9, 1e-18);
}

TEST(RunTimes, OfTwoAxesAtOnceTheInnermostCounts) {
  timeline::Timeline timeline{
      .spans = {pass(0, "forward", timeline::SpanKind::forward, 0, 10)}};
  timeline.spans.push_back(call(0, "dp_replicate", 10, 30));
  timeline.spans.push_back(call(0, "tp", 15, 20));
  const RankTimes mean = run_times(timeline, {}).mean;
  EXPECT_NEAR(mean.communication.at("tp"), 5e-9, 1e-18);
  EXPECT_NEAR(mean.communication.at("dp"), 15e-9, 1e-18);
}

// Whatever ranks sum gradients: replicas, or those of fsdp and cp too.
TEST(RunTimes, GroupsThatSumGradientsCountAsDp) {
  for (const char* group : {"dp_replicate", "dp", "data"}) {
    timeline::Timeline timeline{
        .spans = {pass(0, "forward", timeline::SpanKind::forward, 0, 10)}};
    timeline.spans.push_back(call(0, group, 10, 30));
    const RankTimes mean = run_times(timeline, {}).mean;
    ASSERT_EQ(mean.communication.size(), 1u) << group;
    EXPECT_NEAR(mean.communication.at("dp"), 20e-9, 1e-18) << group;
  }
}

TEST(RunTimes, RanksArePeersByTheFirstOfTheirStages) {
  const RunTimes times = run_times(
      {.spans =
           {pass(0, "2F0", timeline::SpanKind::forward, 0, 10),
            pass(0, "0F0", timeline::SpanKind::forward, 10, 20),
            pass(1, "1F0", timeline::SpanKind::forward, 0, 10)}},
      {});
  EXPECT_EQ(times.ranks.at(0).first_stage, 0);
  EXPECT_EQ(times.ranks.at(1).first_stage, 1);
}

// For every simulated layout the parts add up and the axes are its own.
TEST(RunTimes, AddUpToTheStep) {
  const struct {
    Layout layout;
    std::vector<std::string> axes;
  } cases[] = {
      {{}, {}},
      {{.dp_replicate = 4}, {"dp"}},
      {{.dp_shard = 4}, {"fsdp"}},
      {{.tp = 4}, {"tp"}},
      {{.pp = 4}, {}},
      {{.dp_replicate = 2, .tp = 2, .pp = 2}, {"dp", "tp"}},
      {{.dp_shard = 2, .tp = 2}, {"fsdp", "tp"}},
  };
  for (const auto& one : cases) {
    cost::Strategy strategy;
    strategy.layout = one.layout;
    strategy.global_batch = 32;
    strategy.zero_stage = one.layout.dp_shard > 1 ? 3 : 0;
    const simulator::SimulatedRun run = simulator::simulate(
        cost::find_model("gpt2"), strategy,
        cluster::find_cluster("h100-sxm:1x8"),
        {.steps = 3, .jitter = 0.1, .seed = 5});
    const RunTimes times = run_times(run.timeline, one.layout);
    ASSERT_EQ(static_cast<int64_t>(times.ranks.size()), one.layout.num_ranks());
    for (const RankHistory& rank : times.ranks) {
      ASSERT_EQ(rank.steps.size(), 3u);
      for (const RankTimes& step : rank.steps) {
        double sum = step.compute() + step.data + step.for_ranks +
                     step.for_stages + step.idle;
        for (const auto& [axis, seconds] : step.communication) sum += seconds;
        EXPECT_NEAR(sum, step.step, 1e-6 * step.step);
      }
    }
    std::vector<std::string> axes;
    for (const auto& [axis, seconds] : times.mean.communication) {
      if (axis != "pp" && !axis.empty()) axes.push_back(axis);
    }
    EXPECT_EQ(axes, one.axes) << to_string(one.layout);
    EXPECT_EQ(times.pipeline, one.layout.pp > 1);
  }
}

// The timeline shows the exposed communication of the simulated events.
TEST(RunTimes, SeeTheCommunicationThatTheSimulatorMade) {
  const cost::Strategy strategy{.layout = {.tp = 4}, .global_batch = 32};
  const simulator::SimulatedRun run = simulator::simulate(
      cost::find_model("gpt2"), strategy,
      cluster::find_cluster("h100-sxm:1x8"));
  const RunTimes times = run_times(run.timeline, strategy.layout);
  const double exposed = run.step.parts.exposed[static_cast<size_t>(Axis::tp)];
  EXPECT_NEAR(times.mean.communication.at("tp"), exposed, 0.02 * exposed);
}

// Two stages, the second one twice as long; rank 1 is in its pass before its
// input is.
timeline::Timeline two_stages() {
  timeline::Timeline timeline{
      .spans = {
          pass(0, "0F0", timeline::SpanKind::forward, 0, 10),
          pass(0, "wait 1B0", timeline::SpanKind::communication, 10, 70),
          pass(0, "0B0", timeline::SpanKind::backward, 70, 90),
          pass(1, "1F0", timeline::SpanKind::forward, 2, 30),
          pass(1, "wait 0F0", timeline::SpanKind::communication, 4, 12),
          pass(1, "1B0", timeline::SpanKind::backward, 30, 70)}};
  for (timeline::Span& span : timeline.spans) {  // milliseconds
    span.begin_ns *= 1'000'000;
    span.end_ns *= 1'000'000;
  }
  return timeline;
}

TEST(StageCosts, AreForwardAndBackwardWithoutTheWaitsInside) {
  const auto costs = stage_costs(two_stages(), {0});
  ASSERT_TRUE(costs);
  EXPECT_THAT(
      costs->seconds,
      ElementsAre(
          testing::DoubleNear(0.030, 1e-9), testing::DoubleNear(0.060, 1e-9)));
  EXPECT_THAT(costs->slowest_ranks, ElementsAre(1));
  EXPECT_NEAR(costs->as_they_are, 0.090, 1e-9);
  EXPECT_NEAR(costs->even, 0.090, 1e-9);  // one microbatch: no rank is ahead
  EXPECT_NEAR(costs->busy_share, 0.5, 1e-9);
}

TEST(StageCosts, OfWhatIsNoPipelineAreNone) {
  EXPECT_FALSE(stage_costs(
      {.spans = {pass(0, "forward", timeline::SpanKind::forward, 0, 1)}}, {0}));
  EXPECT_FALSE(stage_costs(two_stages(), {1}));
}

}  // namespace echelon::explain::run_times_test
