#include "echelon/timeline/overlap.h"

#include <gmock/gmock.h>

#include <random>
#include <set>

#include "tests/report/sample_run.h"

namespace echelon::timeline::overlap_test {

using testing::ElementsAre;
using testing::HasSubstr;

Span span(
    std::string track, SpanKind kind, int64_t begin, int64_t end,
    int32_t rank = 0, int64_t step = 0) {
  return {rank, std::move(track), span_kind_name(kind), kind, begin, end, step};
}

constexpr auto kForward = SpanKind::forward;
constexpr auto kBackward = SpanKind::backward;
constexpr auto kComm = SpanKind::communication;
constexpr auto kData = SpanKind::data;

// Tells for each nanosecond of [0, 1000) whether an interval contains it.
std::vector<bool> sampled(const std::vector<Interval>& intervals) {
  std::vector<bool> result(1000, false);
  for (const auto& [begin, end] : intervals) {
    for (int64_t t = begin; t < end; ++t) result[t] = true;
  }
  return result;
}

std::vector<Interval> random_intervals(std::mt19937& random, int count) {
  std::vector<Interval> result;
  for (int i = 0; i < count; ++i) {
    const int64_t begin = random() % 900;
    result.push_back({begin, begin + static_cast<int64_t>(random() % 100)});
  }
  return result;
}

TEST(Intervals, AgreeWithSampling) {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    const auto a = random_intervals(random, round % 12);
    const auto b = random_intervals(random, random() % 12);
    const Intervals x = merged(a);
    const Intervals y = merged(b);
    const auto in_a = sampled(a);
    const auto in_b = sampled(b);
    EXPECT_EQ(sampled(x), in_a);
    const auto both = sampled(intersection(x, y));
    const auto first = sampled(difference(x, y));
    for (int t = 0; t < 1000; ++t) {
      ASSERT_EQ(both[t], in_a[t] && in_b[t]) << round << " at " << t;
      ASSERT_EQ(first[t], in_a[t] && !in_b[t]) << round << " at " << t;
    }
    EXPECT_EQ(total_length(x), std::count(in_a.begin(), in_a.end(), true));
  }
}

TEST(Intervals, MergedOnesDoNotTouch) {
  EXPECT_EQ(
      merged({{5, 7}, {1, 3}, {3, 4}, {6, 9}, {2, 2}, {12, 11}}),
      (Intervals{{1, 4}, {5, 9}}));
}

TEST(Overlap, OfSpansMadeByHand) {
  // compute  0-100 forward, 100-300 backward, 380-400 and 440-450 optimizer
  // comm     150-250 bucket 0, 240-380 bucket 1
  // data     400-430
  const Timeline timeline{
      .spans = {
          span("compute", kForward, 0, 100),
          span("compute", kBackward, 100, 300), span("comm", kComm, 150, 250),
          span("comm", kComm, 240, 380),
          span("compute", SpanKind::optimizer, 380, 400),
          span("compute", kData, 400, 430),
          span("compute", SpanKind::other, 430, 440),
          span("compute", SpanKind::optimizer, 440, 450)}};
  const auto activities = step_activities(timeline);
  ASSERT_EQ(activities.size(), 1u);
  const auto& a = activities[0];
  EXPECT_EQ(a.window, (Interval{0, 450}));
  EXPECT_EQ(a.compute, (Intervals{{0, 300}, {380, 400}, {440, 450}}));
  EXPECT_EQ(a.communication, (Intervals{{150, 380}}));
  EXPECT_EQ(a.overlapped, (Intervals{{150, 300}}));
  EXPECT_EQ(a.exposed, (Intervals{{300, 380}}));
  EXPECT_EQ(a.data, (Intervals{{400, 430}}));
  const auto b = diagnose(timeline).steps.at(0);
  EXPECT_DOUBLE_EQ(b.step_seconds, 450e-9);
  EXPECT_DOUBLE_EQ(b.compute_seconds, 330e-9);
  EXPECT_DOUBLE_EQ(b.communication_seconds, 230e-9);
  EXPECT_DOUBLE_EQ(b.overlapped_seconds, 150e-9);
  EXPECT_DOUBLE_EQ(b.exposed_seconds, 80e-9);
  EXPECT_DOUBLE_EQ(b.data_seconds, 30e-9);
  EXPECT_NEAR(b.idle_seconds, 10e-9, 1e-15);
}

TEST(Overlap, AWaitInsideOfBackwardDoesNotCompute) {
  const Timeline timeline{
      .spans = {
          span("compute", kBackward, 0, 100), span("compute", kComm, 60, 90),
          span("comm", kComm, 40, 85)}};
  const auto a = step_activities(timeline).at(0);
  EXPECT_EQ(a.compute, (Intervals{{0, 60}, {90, 100}}));
  EXPECT_EQ(a.overlapped, (Intervals{{40, 60}}));
  EXPECT_EQ(a.exposed, (Intervals{{60, 90}}));
}

TEST(BackwardWaits, BeginWithTheLastCollectiveAndEndWithAllOfThem) {
  std::vector<Span> spans = {
      span("compute", kBackward, 100, 300), span("comm", kComm, 150, 290),
      span("comm", kComm, 260, 280), span("comm", kComm, 300, 320)};
  add_backward_waits(spans);
  ASSERT_EQ(spans.size(), 5u);
  EXPECT_EQ(spans[4].track, "compute");
  EXPECT_EQ(spans[4].name, "wait for gradients");
  EXPECT_EQ(spans[4].kind, kComm);
  EXPECT_EQ(spans[4].begin_ns, 260);
  EXPECT_EQ(spans[4].end_ns, 290);
  const auto a = step_activities({.spans = spans}).at(0);
  EXPECT_EQ(a.compute, (Intervals{{100, 260}, {290, 300}}));
  EXPECT_EQ(a.exposed, (Intervals{{260, 290}, {300, 320}}));
  // Known by then: adding again changes nothing.
  add_backward_waits(spans);
  EXPECT_EQ(spans.size(), 5u);
}

TEST(BackwardWaits, AreNotAddedWithoutCollectives) {
  std::vector<Span> spans = {
      span("compute", kBackward, 100, 300), span("compute", kForward, 0, 100),
      span("comm", kComm, 20, 150), span("comm", kComm, 300, 310)};
  add_backward_waits(spans);
  EXPECT_EQ(spans.size(), 4u);
}

TEST(BackwardWaits, DoNotOutlastBackward) {
  std::vector<Span> spans = {
      span("compute", kBackward, 100, 300), span("comm", kComm, 250, 400)};
  add_backward_waits(spans);
  EXPECT_EQ(spans.at(2).end_ns, 300);
}

TEST(Overlap, EvaluationAndSpansOutsideOfStepsAreLeftOut) {
  const Timeline timeline{
      .spans = {
          span("compute", kForward, 10, 20),
          span("compute", SpanKind::evaluation, 20, 900),
          span("compute", kForward, 0, 10, 0, -1)}};
  const auto activities = step_activities(timeline);
  ASSERT_EQ(activities.size(), 1u);
  EXPECT_EQ(activities[0].window, (Interval{10, 20}));
}

// The rank evaluates, or saves, after the step.
TEST(Overlap, WhatFollowsAStepIsNoneOfIt) {
  for (const SpanKind after : {SpanKind::evaluation, SpanKind::other}) {
    const Timeline timeline{
        .spans = {
            span("compute", kForward, 10, 20),
            span("compute", SpanKind::other, 20, 25),  // a copy beside
            span("compute", kBackward, 25, 40), span("comm", kComm, 38, 55),
            span("compute", after, 50, 90), span("comm", kComm, 60, 70),
            span("compute", kComm, 60, 70), span("comm", kComm, 92, 99)}};
    const auto activities = step_activities(timeline);
    ASSERT_EQ(activities.size(), 1u);
    // A collective that began before is part of the step.
    EXPECT_EQ(activities[0].window, (Interval{10, 55}));
    EXPECT_EQ(total_length(activities[0].communication), 17);
    EXPECT_EQ(activities[0].spans.size(), 4u);
    const Diagnosis diagnosis = diagnose(timeline);
    EXPECT_NEAR(diagnosis.mean.step_seconds, 45e-9, 1e-15);
    EXPECT_NEAR(
        timed_parts(timeline, diagnosis).step_seconds(),
        diagnosis.mean.step_seconds, 1e-15);
  }
}

TEST(Overlap, AStepOfAnEvaluationAloneIsNone) {
  const Timeline timeline{
      .spans = {
          span("compute", SpanKind::evaluation, 20, 900),
          span("comm", kComm, 30, 40)}};
  EXPECT_TRUE(step_activities(timeline).empty());
  EXPECT_EQ(diagnose(timeline).num_steps, 0);
}

// The kind of a track at one nanosecond, found by looking at every span.
SpanKind kind_at(
    const std::vector<Span>& spans, const std::string& track, int64_t time) {
  const Span* owner = nullptr;
  for (const auto& s : spans) {
    if (s.track != track || time < s.begin_ns || time >= s.end_ns) continue;
    const bool later =
        owner == nullptr || std::pair(s.begin_ns, -s.end_ns) >=
                                std::pair(owner->begin_ns, -owner->end_ns);
    if (later) owner = &s;
  }
  return owner == nullptr ? SpanKind::other : owner->kind;
}

TEST(Overlap, AgreesWithSamplingEachNanosecond) {
  std::mt19937 random(11);
  constexpr SpanKind kKinds[] = {kForward, kBackward, SpanKind::optimizer,
                                 kComm,    kData,     SpanKind::other};
  for (int round = 0; round < 100; ++round) {
    std::vector<Span> spans;
    for (int i = 0; i < 12; ++i) {
      const int64_t begin = random() % 800;
      const auto kind = kKinds[random() % 6];
      spans.push_back(span(
          kind == kComm && random() % 2 ? "comm"
          : random() % 8                ? "compute"
                                        : "loader",
          kind, begin, begin + 1 + static_cast<int64_t>(random() % 200)));
    }
    // The step ends with this span, so no earlier span of kind `other` ends it.
    spans.push_back(span("compute", SpanKind::optimizer, 999, 1000));
    const Timeline timeline{.spans = spans};
    const auto a = step_activities(timeline).at(0);
    const auto compute = sampled(a.compute);
    const auto overlapped = sampled(a.overlapped);
    const auto exposed = sampled(a.exposed);
    const auto data = sampled(a.data);
    for (int64_t t = 0; t < 1000; ++t) {
      bool computes = false;
      bool waits = false;
      bool communicates = false;
      for (const char* track : {"compute", "comm", "loader"}) {
        const auto kind = kind_at(spans, track, t);
        computes |= kind == kForward || kind == kBackward ||
                    kind == SpanKind::optimizer;
        waits |= kind == kData;
      }
      for (const auto& s : spans) {
        communicates |= s.kind == kComm && t >= s.begin_ns && t < s.end_ns;
      }
      ASSERT_EQ(compute[t], computes) << round << " at " << t;
      ASSERT_EQ(overlapped[t], communicates && computes) << round;
      ASSERT_EQ(exposed[t], communicates && !computes) << round;
      ASSERT_EQ(data[t], waits && !computes && !communicates) << round;
    }
  }
}

TEST(Diagnosis, PartsAddUpToTheStep) {
  const auto d = diagnose(report::sample::run({.ranks = 3}).timeline);
  EXPECT_EQ(d.steps.size(), 60u);
  EXPECT_EQ(d.num_steps, 20);
  for (const auto& b : d.steps) {
    EXPECT_NEAR(
        b.compute_seconds + b.exposed_seconds + b.data_seconds + b.idle_seconds,
        b.step_seconds, 1e-12);
    EXPECT_NEAR(
        b.overlapped_seconds + b.exposed_seconds, b.communication_seconds,
        1e-12);
    EXPECT_GT(b.overlapped_seconds, 0);
    EXPECT_GT(b.exposed_seconds, 0);
  }
}

TEST(Diagnosis, NamesTheSlowestRankAndLeavesOutlyingStepsOut) {
  const auto d =
      diagnose(report::sample::run({.ranks = 4, .slow_rank = 0.4}).timeline);
  EXPECT_EQ(d.slowest_rank, 3);
  EXPECT_NEAR(d.slowest_excess, 0.27, 0.02);
  EXPECT_EQ(d.num_outliers, 1);  // the first step takes four times as long
  EXPECT_LT(d.mean.step_seconds, 0.030);
  EXPECT_THAT(d.sentence, HasSubstr("rank 3 works"));
}

// Each step of one rank, so long.
Diagnosis of_steps(const std::vector<int64_t>& lengths) {
  Timeline timeline;
  int64_t begin = 0;
  for (size_t step = 0; step < lengths.size(); ++step) {
    timeline.spans.push_back(span(
        "compute", kForward, begin, begin + lengths[step], 0,
        static_cast<int64_t>(step)));
    begin += lengths[step];
  }
  return diagnose(timeline);
}

TEST(Diagnosis, OutliersAreLongerThanThreeOfTheMiddleStep) {
  EXPECT_EQ(of_steps({1, 10, 10, 29, 31}).outliers, (std::set<int64_t>{4}));
  EXPECT_EQ(of_steps({1, 1, 10, 10, 12}).num_outliers, 0);
}

TEST(Diagnosis, ARankThatWaitsForItsDataIsTheSlowest) {
  const Diagnosis d = diagnose(
      {.spans = {
           span("compute", kForward, 0, 60, 0), span("comm", kComm, 60, 90, 0),
           span("compute", kData, 0, 40, 1),
           span("compute", kForward, 40, 90, 1)}});
  EXPECT_EQ(d.slowest_rank, 1);
  EXPECT_NEAR(d.slowest_excess, 0.2, 1e-9);
}

Diagnosis of_one_step(std::vector<Span> spans) {
  return diagnose({.spans = std::move(spans)});
}

TEST(Diagnosis, SaysWhatHeldTheRunBack) {
  const auto forward = span("compute", kForward, 0, 60);
  EXPECT_EQ(
      of_one_step({forward, span("comm", kComm, 40, 100)}).sentence,
      "40 % of the step is exposed communication; 33 % of all communication "
      "hides behind computation.");
  EXPECT_EQ(
      of_one_step({forward, span("compute", kData, 60, 100)}).sentence,
      "40 % of the step is waiting for data; more loader threads or less work "
      "per sample would shorten it.");
  EXPECT_EQ(
      of_one_step({forward, span("compute", kForward, 99, 100)}).sentence,
      "39 % of the step is neither computation, communication nor waiting for "
      "data.");
  EXPECT_EQ(
      of_one_step({forward, span("comm", kComm, 40, 61)}).sentence,
      "Computation fills 98.4 % of the step; 1.6 % is exposed communication.");
  EXPECT_EQ(
      of_one_step({forward}).sentence, "Computation fills 100 % of the step.");
  EXPECT_EQ(diagnose({}).sentence, "");
  EXPECT_EQ(of_one_step({forward}).slowest_rank, -1);
}

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

// A step of sharded data parallelism: nothing hides the gather, computation
// hides a part of the sum, and the step's figures are summed.
Made sharded() {
  Made made;
  for (const int32_t rank : {0, 1}) {
    made.compute(rank, "data wait", SpanKind::data, 0, 1)
        .compute(rank, "forward", kForward, 1, 5)
        .add(rank, "comm", "all_gather fc", kComm, 1, 2, "dp_shard")
        .compute(rank, "wait for all_gather fc", kComm, 1, 2)
        .compute(rank, "backward", kBackward, 5, 12)
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
  made.compute(0, "forward", kForward, 0, 4)
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
  made.compute(0, "forward", kForward, 0, 3)
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
    made.add(0, "compute", "forward", kForward, begin, begin + 10, "", step)
        .add(
            1, "compute", "forward", kForward, begin + 6, begin + 16, "", step);
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
  made.compute(0, "0F0", kForward, 0, 2)
      .compute(0, "wait 1B0", kComm, 2, 8)
      .compute(0, "0B0", kBackward, 8, 12)
      .compute(0, "optimizer", SpanKind::optimizer, 12, 13);
  made.compute(1, "1F0", kForward, 2, 4)
      .compute(1, "1B0", kBackward, 4, 8)
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
        0, "compute", "forward", kForward, begin, begin + (step == 0 ? 90 : 10),
        "", step);
  }
  EXPECT_NEAR(made.parts().step_seconds(), 10e-3, 1e-12);
  EXPECT_EQ(Made().parts().step_seconds(), 0);
}

TEST(TimedParts, AgreeWithTheDiagnosis) {
  const auto timeline =
      report::sample::run({.ranks = 4, .slow_rank = 0.2}).timeline;
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

}  // namespace echelon::timeline::overlap_test
