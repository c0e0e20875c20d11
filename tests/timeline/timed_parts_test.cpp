#include "echelon/timeline/overlap.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/report/sample_pipeline.h"
#include "tests/report/sample_run.h"

namespace echelon {
namespace timed_parts_test {

using testing::ElementsAre;

constexpr int64_t kMs = 1'000'000;

struct Made {
  Timeline timeline;

  Made&
  add(int32_t rank, const char* track, const std::string& name, SpanKind kind,
      double begin, double end, const char* axis = "", int64_t step = 0) {
    timeline.spans.push_back(
        {rank, track, name, kind, static_cast<int64_t>(begin * kMs),
         static_cast<int64_t>(end * kMs), step, 0, axis});
    return *this;
  }
  Made& compute(
      int32_t rank, const std::string& name, SpanKind kind, double begin,
      double end) {
    return add(rank, "compute", name, kind, begin, end);
  }
  TimedParts parts() const { return timed_parts(timeline, diagnose(timeline)); }
};

constexpr auto kComm = SpanKind::communication;

// Of sharded data parallelism: a gather that nothing hides, a sum that
// something hides in part, the step's figures.
Made sharded() {
  Made made;
  for (const int32_t rank : {0, 1}) {
    made.compute(rank, "data wait", SpanKind::data, 0, 1)
        .compute(rank, "forward", SpanKind::forward, 1, 5)
        .add(rank, "comm", "all_gather fc", kComm, 1, 2, "dp_shard")
        .compute(rank, "wait for all_gather fc", kComm, 1, 2)
        .compute(rank, "backward", SpanKind::backward, 5, 12)
        .add(rank, "comm", "all_reduce bucket 0", kComm, 9, 14, "dp_replicate")
        .add(rank, "comm", "all_reduce figures", kComm, 14, 14.5, "world")
        .compute(rank, "optimizer", SpanKind::optimizer, 15, 17);
  }
  return made;
}

TEST(TimedParts, OfAStepAddUpToIt) {
  const TimedParts parts = sharded().parts();
  EXPECT_NEAR(parts.forward, 3e-3, 1e-12);
  EXPECT_NEAR(parts.backward, 7e-3, 1e-12);
  EXPECT_NEAR(parts.optimizer, 2e-3, 1e-12);
  EXPECT_NEAR(parts.data, 1e-3, 1e-12);
  EXPECT_NEAR(parts.exposed.at("dp_shard"), 1e-3, 1e-12);
  EXPECT_NEAR(parts.exposed.at("dp_replicate"), 2e-3, 1e-12);
  EXPECT_NEAR(parts.exposed.at("world"), 0.5e-3, 1e-12);
  EXPECT_NEAR(parts.other, 0.5e-3, 1e-12);
  EXPECT_EQ(parts.stages, 0);
  EXPECT_NEAR(parts.step_seconds(), 17e-3, 1e-12);
}

TEST(TimedParts, AWaitIsOfTheAxisThatItWaitsFor) {
  // While rank 0 waits for tp, a sum along dp is on its way too.
  Made made;
  made.compute(0, "forward", SpanKind::forward, 0, 4)
      .add(0, "comm", "all_reduce attn", kComm, 4, 6, "tp")
      .compute(0, "wait for all_reduce attn", kComm, 4, 6)
      .add(0, "comm 2", "all_reduce bucket 0", kComm, 3, 9, "dp_replicate")
      .compute(0, "optimizer", SpanKind::optimizer, 9, 10);
  const TimedParts parts = made.parts();
  EXPECT_NEAR(parts.exposed.at("tp"), 2e-3, 1e-12);
  EXPECT_NEAR(parts.exposed.at("dp_replicate"), 3e-3, 1e-12);
}

TEST(TimedParts, OfTwoAxesAtOnceTheInnermostCounts) {
  Made made;
  made.compute(0, "forward", SpanKind::forward, 0, 3)
      .add(0, "comm 2", "all_reduce bucket 0", kComm, 3, 9, "dp_replicate")
      .add(0, "comm", "all_reduce attn", kComm, 4, 6, "tp")
      .add(0, "comm 3", "all_gather fc", kComm, 5, 8, "dp_shard")
      .compute(0, "optimizer", SpanKind::optimizer, 9, 10);
  const TimedParts parts = made.parts();
  EXPECT_NEAR(parts.exposed.at("tp"), 2e-3, 1e-12);
  EXPECT_NEAR(parts.exposed.at("dp_shard"), 2e-3, 1e-12);
  EXPECT_NEAR(parts.exposed.at("dp_replicate"), 2e-3, 1e-12);
}

// A rank that is behind in each step is not waited for twice.
TEST(TimedParts, RanksMayBeginAStepAtDifferentTimes) {
  Made made;
  for (int64_t step = 0; step < 4; ++step) {
    const double begin = 10.0 * static_cast<double>(step);
    made.add(
            0, "compute", "forward", SpanKind::forward, begin, begin + 10, "",
            step)
        .add(
            1, "compute", "forward", SpanKind::forward, begin + 6, begin + 16,
            "", step);
  }
  EXPECT_NEAR(made.parts().step_seconds(), 10e-3, 1e-12);
  EXPECT_NEAR(made.parts().other, 0, 1e-12);
}

TEST(TimedParts, WhatFollowsAStepIsNoneOfIt) {
  Made made = sharded();
  for (const int32_t rank : {0, 1}) {
    made.compute(rank, "evaluation", SpanKind::evaluation, 17, 40)
        .add(rank, "comm", "all_reduce score", kComm, 38, 40, "world");
  }
  EXPECT_NEAR(made.parts().step_seconds(), 17e-3, 1e-12);
  EXPECT_NEAR(made.parts().exposed.at("world"), 0.5e-3, 1e-12);
}

TEST(TimedParts, RanksOfAPipelineWaitForOtherStages) {
  Made made;
  made.compute(0, "0F0", SpanKind::forward, 0, 2)
      .compute(0, "wait 1B0", kComm, 2, 8)
      .compute(0, "0B0", SpanKind::backward, 8, 12)
      .compute(0, "optimizer", SpanKind::optimizer, 12, 13);
  made.compute(1, "1F0", SpanKind::forward, 2, 4)
      .compute(1, "1B0", SpanKind::backward, 4, 8)
      .compute(1, "optimizer", SpanKind::optimizer, 8, 9)
      .add(1, "comm", "all_reduce figures", kComm, 9, 11, "world");
  const TimedParts parts = made.parts();
  EXPECT_NEAR(parts.step_seconds(), 13e-3, 1e-12);
  EXPECT_NEAR(parts.forward, 2e-3, 1e-12);
  EXPECT_NEAR(parts.backward, 4e-3, 1e-12);
  // 6 ms of rank 0; of rank 1 two before its first action, four after its last,
  // in some of which it waits for the figures of the step.
  EXPECT_TRUE(parts.exposed.empty());
  EXPECT_NEAR(parts.stages, 6e-3, 1e-12);
  EXPECT_NEAR(parts.other, 0, 1e-12);
}

TEST(TimedParts, LeaveOutliersOut) {
  Made made;
  for (int64_t step = 0; step < 5; ++step) {
    const double begin = 100.0 * static_cast<double>(step);
    made.add(
        0, "compute", "forward", SpanKind::forward, begin,
        begin + (step == 0 ? 90 : 10), "", step);
  }
  EXPECT_NEAR(made.parts().step_seconds(), 10e-3, 1e-12);
  EXPECT_EQ(Made().parts().step_seconds(), 0);
}

TEST(TimedParts, AgreeWithTheDiagnosis) {
  const auto timeline = sample::run({.ranks = 4, .slow_rank = 0.2}).timeline;
  const Diagnosis diagnosis = diagnose(timeline);
  const TimedParts parts = timed_parts(timeline, diagnosis);
  EXPECT_NEAR(
      parts.forward + parts.backward + parts.optimizer,
      diagnosis.mean.compute_seconds, 1e-9);
  EXPECT_NEAR(parts.exposed.at(""), diagnosis.mean.exposed_seconds, 1e-9);
  EXPECT_NEAR(parts.data, diagnosis.mean.data_seconds, 1e-9);
  EXPECT_GE(parts.step_seconds(), diagnosis.mean.step_seconds);
}

TEST(TimedParts, AreComparedWhereEitherHasThem) {
  TimedParts predicted{
      .forward = 1, .exposed = {{"tp", 2}}, .data = 2e-10, .other = 1e-10};
  TimedParts measured{
      .forward = 3, .exposed = {{"world", 4}}, .data = 5, .other = 1e-10};
  std::vector<std::string> names;
  for (const auto& part : compared_parts(predicted, measured)) {
    names.push_back(part.name);
    if (part.name == "waiting for data") {
      EXPECT_EQ(part.predicted, 0);  // rounding
    }
  }
  EXPECT_THAT(
      names, ElementsAre(
                 "forward", "tp, not hidden", "figures of all ranks",
                 "waiting for data"));
}

}  // namespace timed_parts_test
}  // namespace echelon
