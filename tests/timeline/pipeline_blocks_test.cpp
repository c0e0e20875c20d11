#include "echelon/timeline/pipeline_blocks.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <set>

#include "echelon/timeline/overlap.h"
#include "tests/report/sample_pipeline.h"

namespace echelon::timeline::pipeline_blocks_test {

using report::sample::Order;
using testing::ElementsAre;
using testing::IsEmpty;

constexpr int64_t kMs = 1'000'000;

Span action(int32_t rank, const char* name, int64_t begin_ms, int64_t end_ms) {
  const bool forward = std::string(name).find('F') != std::string::npos;
  return {
      .rank = rank,
      .track = "compute",
      .name = name,
      .kind = forward ? SpanKind::forward : SpanKind::backward,
      .begin_ns = begin_ms * kMs,
      .end_ns = end_ms * kMs,
      .step = 1};
}

Span of_kind(Span span, SpanKind kind, const char* track, const char* name) {
  span.kind = kind;
  span.track = track;
  span.name = name;
  return span;
}

Span comm(
    int32_t rank, const char* track, const char* name, int64_t begin_ms,
    int64_t end_ms) {
  return of_kind(
      action(rank, "", begin_ms, end_ms), SpanKind::communication, track, name);
}

// "1F0@0-2": row, letter, microbatch and milliseconds.
std::vector<std::string> texts(const std::vector<PipelineBlock>& blocks) {
  std::vector<std::string> result;
  for (const auto& b : blocks) {
    result.push_back(
        std::to_string(b.row) + letter(b.kind) + std::to_string(b.microbatch) +
        "@" + std::to_string(std::lround(b.begin * 1e3)) + "-" +
        std::to_string(std::lround(b.end * 1e3)));
  }
  return result;
}

TEST(PipelineBlocks, NamesOfSpansAreActionsOrNot) {
  const auto block = block_of_name("12W345");
  ASSERT_TRUE(block.has_value());
  EXPECT_EQ(block->stage, 12);
  EXPECT_EQ(block->microbatch, 345);
  EXPECT_EQ(block->kind, BlockKind::backward_weight);
  EXPECT_EQ(block_of_name("0F0")->kind, BlockKind::forward);
  EXPECT_EQ(block_of_name("0B0")->kind, BlockKind::backward);
  EXPECT_EQ(block_of_name("0I0")->kind, BlockKind::backward_input);
  for (const char* name :
       {"", "F", "0F", "F0", "0F1x", "wait 0F1", "-1F0", "0F-1", "0X1",
        "forward", "0FF1", "99999999999F1"}) {
    EXPECT_FALSE(block_of_name(name).has_value()) << name;
  }
}

TEST(PipelineBlocks, AreTheActionsOfAStepFromItsFirst) {
  Timeline timeline;
  timeline.spans = {
      action(1, "1F0", 12, 14), action(0, "0F0", 10, 12),
      action(1, "1B0", 14, 18), action(0, "0B0", 19, 23),
      // These spans are not actions of this step.
      of_kind(action(0, "", 9, 30), SpanKind::forward, "compute", "forward"),
      of_kind(action(0, "", 5, 9), SpanKind::data, "compute", "0F0"),
      of_kind(action(0, "", 23, 25), SpanKind::optimizer, "compute", "adam"),
      action(0, "0F7", 20, 20), action(0, "0F8", 20, 12)};
  auto other = action(0, "0F0", 40, 42);
  other.step = 2;
  timeline.spans.push_back(other);
  EXPECT_THAT(
      texts(pipeline_rows(timeline, 1).blocks),
      ElementsAre("0F0@0-2", "0B0@9-13", "1F0@2-4", "1B0@4-8"));
  EXPECT_THAT(pipeline_rows(timeline, 3).blocks, IsEmpty());
  // Busy 6 + 6 of 2 x 13.
  EXPECT_NEAR(
      bubble_fraction(pipeline_rows(timeline, 1).blocks, 2), 1 - 12.0 / 26,
      1e-9);
}

TEST(PipelineBlocks, WaitsInsideOfAnActionAreCutOut) {
  Timeline timeline;
  timeline.spans = {
      action(0, "0F0", 0, 10), comm(0, "compute", "wait 0F0", 0, 2),
      comm(0, "compute", "wait 0F0", 5, 6),
      // The wait of another rank cuts nothing here.
      comm(1, "compute", "wait 1F0", 7, 9), action(1, "1F0", 10, 20)};
  const auto blocks = pipeline_rows(timeline, 1).blocks;
  EXPECT_THAT(texts(blocks), ElementsAre("0F0@2-5", "0F0@6-10", "1F0@10-20"));
  EXPECT_NEAR(bubble_fraction(blocks, 2), 1 - 17.0 / (2 * 18), 1e-9);
}

TEST(PipelineBlocks, WaitsForRanksOfTheSameStageArePartOfAnAction) {
  Timeline timeline;
  timeline.spans = {
      action(0, "0F0", 0, 10),
      comm(0, "compute", "wait for all_reduce block sum", 2, 4),
      action(1, "1F0", 10, 20)};
  EXPECT_THAT(
      texts(pipeline_rows(timeline, 1).blocks),
      ElementsAre("0F0@0-10", "1F0@10-20"));
}

TEST(PipelineBlocks, TransfersAreNoWork) {
  Timeline timeline;
  timeline.spans = {
      action(0, "0F0", 0, 4), comm(0, "comm", "send 0F0", 4, 9),
      action(1, "1F0", 6, 8)};
  const auto blocks = pipeline_rows(timeline, 1).blocks;
  // Cut at the end of the work.
  EXPECT_THAT(texts(blocks), ElementsAre("0F0@0-4", "0T-1@4-8", "1F0@6-8"));
  EXPECT_EQ(blocks[1].name, "send 0F0");
  EXPECT_NEAR(bubble_fraction(blocks, 2), 1 - 6.0 / 16, 1e-9);
  EXPECT_NEAR(makespan(blocks), 8e-3, 1e-12);
}

TEST(PipelineBlocks, AReceiveBeginsWhenThereIsSomethingToReceive) {
  RankSpans first{.rank = 0, .rank_name = "a"};
  first.spans = {
      action(0, "0F0", 0, 4), comm(0, "comm", "send_recv 0F0", 4, 9),
      comm(0, "comm", "send_recv 1B0", 1, 11), action(0, "0B0", 11, 13)};
  RankSpans second{.rank = 1, .rank_name = "b"};
  second.spans = {
      comm(1, "comm", "send_recv 0F0 shape", 0, 1),
      comm(1, "comm", "send_recv 0F0", 1, 6), action(1, "1F0", 6, 8),
      action(1, "1B0", 8, 10), comm(1, "comm", "all_reduce bucket 0", 9, 12)};
  const auto timeline = merge_spans({first, second}, "t");
  EXPECT_THAT(
      texts(pipeline_rows(timeline, 1).blocks),
      ElementsAre(
          "0F0@0-4", "0T-1@10-11", "0B0@11-13", "1T-1@4-6", "1F0@6-8",
          "1B0@8-10", "1T-1@9-12"));
  // What was sent, and what ended before it was made, stay as they were.
  for (const auto& span : timeline.spans) {
    if (span.rank == 0 && span.name == "send_recv 0F0") {
      EXPECT_EQ(span.begin_ns, 4 * kMs);
    }
    EXPECT_LE(span.begin_ns, span.end_ns);
  }
}

TEST(PipelineBlocks, ABackwardThatSendsAsItEndsDoesNotWait) {
  RankSpans rank{.rank = 0, .rank_name = "a"};
  rank.spans = {action(0, "1B0", 0, 10), comm(0, "comm", "send 1B0", 9, 14)};
  EXPECT_EQ(merge_spans({rank}, "t").spans.size(), 2u);
  rank.spans.front().name = "backward";
  EXPECT_EQ(merge_spans({rank}, "t").spans.size(), 3u);
}

TEST(PipelineBlocks, WaitsOfAPipelineAreCalledSo) {
  Timeline timeline;
  timeline.spans = {
      action(0, "0F0", 0, 4), comm(0, "compute", "wait 1B0", 4, 9),
      action(0, "0B0", 9, 12)};
  EXPECT_THAT(
      diagnose(timeline).sentence,
      testing::StartsWith(
          "42 % of the step is waiting for other stages of the pipeline"));
  Span sum = comm(0, "comm", "all_reduce", 4, 9);
  sum.axis = "tp";
  timeline.spans.push_back(sum);
  EXPECT_THAT(
      diagnose(timeline).sentence,
      testing::StartsWith("42 % of the step is exposed communication"));
}

TEST(PipelineBlocks, OverlapsCountOnceAndAMissingRankHasNoRow) {
  Timeline timeline;
  timeline.spans = {
      action(0, "0F0", 0, 4), action(0, "0F1", 2, 6), action(2, "2F0", 6, 8)};
  const auto rows = pipeline_rows(timeline, 1);
  ASSERT_EQ(rows.rows.size(), 2u);
  EXPECT_EQ(rows.rows[1].name, "rank 2");
  EXPECT_NEAR(bubble_fraction(rows.blocks, 2), 0.5, 1e-9);
  EXPECT_EQ(bubble_fraction({}, 4), 0);
  EXPECT_EQ(bubble_fraction({}, 0), 0);
}

TEST(PipelineBlocks, ReplicasAreTogetherAndStagesInOrder) {
  const auto timeline =
      report::sample::pipeline_run({.ranks = 3, .replicas = 2});
  const auto rows = pipeline_rows(timeline, 2).rows;
  std::vector<std::string> names;
  for (const auto& row : rows) {
    names.push_back(row.name + " of " + std::to_string(row.group));
  }
  EXPECT_THAT(
      names, ElementsAre(
                 "rank 0 of 0", "rank 2 of 0", "rank 4 of 0", "rank 1 of 1",
                 "rank 3 of 1", "rank 5 of 1"));
}

TEST(PipelineBlocks, StagesOfARowAreItsChunks) {
  const auto timeline =
      report::sample::pipeline_run({.order = Order::interleaved});
  for (const auto& block : pipeline_rows(timeline, 2).blocks) {
    if (block.kind == BlockKind::transfer) continue;
    EXPECT_EQ(block.chunk, block.stage / 4);
    EXPECT_EQ(block.row, block.stage % 4);
  }
}

TEST(PipelineBlocks, TheTypicalStepIsCompleteAndNotTheFirst) {
  EXPECT_FALSE(typical_pipeline_step({}).has_value());
  auto timeline = report::sample::pipeline_run({.steps = 4});
  const auto typical = typical_pipeline_step(timeline);
  ASSERT_TRUE(typical.has_value());
  EXPECT_NE(*typical, 1);
  // A step that was interrupted is not typical.
  const auto found = std::find_if(
      timeline.spans.begin(), timeline.spans.end(), [&](const Span& span) {
        return span.step == *typical && span.name == "0B7";
      });
  timeline.spans.erase(found);
  EXPECT_NE(typical_pipeline_step(timeline), typical);
  std::erase_if(timeline.spans, [](const Span& s) { return s.step != 1; });
  EXPECT_EQ(typical_pipeline_step(timeline), 1);
  timeline.spans = {action(0, "0F0", 0, 1), action(0, "0F0", 1, 4)};
  timeline.spans.back().step = 2;
  EXPECT_EQ(typical_pipeline_step(timeline), 2);
}

TEST(PipelineBlocks, TheIdealBubbleIsTheFormulas) {
  for (const auto& [ranks, microbatches] :
       {std::pair(1, 3), {2, 2}, {4, 8}, {4, 2}, {7, 20}}) {
    const double formula = (ranks - 1.0) / (microbatches + ranks - 1.0);
    for (const auto order : {Order::gpipe, Order::one_f_one_b}) {
      const auto ideal = ideal_blocks(report::sample::pipeline_order(
          {.order = order, .ranks = ranks, .microbatches = microbatches}));
      ASSERT_TRUE(ideal.has_value());
      EXPECT_NEAR(bubble_fraction(*ideal, ranks), formula, 1e-9);
      EXPECT_NEAR(makespan(*ideal), 3 * (microbatches + ranks - 1), 1e-9);
    }
  }
  // Gradients of weights fill two thirds of the bubble.
  const auto split =
      ideal_blocks(report::sample::pipeline_order({.order = Order::split}));
  EXPECT_NEAR(bubble_fraction(*split, 4), 3.0 / 27, 1e-9);
  // Two stages a rank fill half of it.
  const auto looped = ideal_blocks(
      report::sample::pipeline_order({.order = Order::interleaved}));
  EXPECT_NEAR(bubble_fraction(*looped, 4), 1.5 / 9.5, 1e-9);
}

TEST(PipelineBlocks, TheIdealOfARunIsThatOfItsSchedule) {
  const auto timeline = report::sample::pipeline_run(
      {.replicas = 2, .slow_stage = 0.5, .latency = 0.3});
  const auto rows = pipeline_rows(timeline, 3);
  const auto ideal = ideal_blocks(rows);
  ASSERT_TRUE(ideal.has_value());
  EXPECT_NEAR(bubble_fraction(*ideal, 8), 3.0 / 11, 1e-9);
  EXPECT_GT(bubble_fraction(rows.blocks, 8), 0.35);
}

TEST(PipelineBlocks, AReplayOfABrokenStepEndsToo) {
  // Missing blocks count as done.
  PipelineRows rows{{{"a", 0}, {"b", 0}}, {}};
  PipelineBlock block{
      .row = 1, .kind = BlockKind::backward, .stage = 1, .microbatch = 0};
  rows.blocks = {block};
  EXPECT_TRUE(ideal_blocks(rows).has_value());
  // Its own forward comes after it: nobody could run this.
  block.kind = BlockKind::forward;
  block.begin = 1;
  rows.blocks.push_back(block);
  EXPECT_FALSE(ideal_blocks(rows).has_value());
}

TEST(PipelineBlocks, DevicesOfARankAreRows) {
  const auto timeline = report::sample::placement_run(3, 4);
  const auto step = typical_placement_step(timeline);
  ASSERT_TRUE(step.has_value());
  const auto rows = placement_rows(timeline, *step);
  ASSERT_EQ(rows.rows.size(), 3u);
  EXPECT_EQ(rows.rows[2].name, "device 2");
  EXPECT_THAT(
      texts(rows.blocks), ElementsAre(
                              "0F-1@0-2", "0B-1@18-22", "1F-1@2-5",
                              "1B-1@13-18", "2F-1@5-8", "2B-1@8-13"));
  EXPECT_GT(bubble_fraction(rows.blocks, 3), 0.6);
  EXPECT_FALSE(typical_pipeline_step(timeline).has_value());
  EXPECT_FALSE(
      typical_placement_step(report::sample::pipeline_run({})).has_value());
}

TEST(PipelineBlocks, TracksThatAreNoDevicesAreLeftOut) {
  Timeline timeline;
  for (const char* track :
       {"device", "device ", "device x", "device 1x", "devices 1",
        "device 12345678", "compute"}) {
    timeline.spans.push_back(
        of_kind(action(0, "", 0, 1), SpanKind::forward, track, "forward"));
  }
  EXPECT_FALSE(typical_placement_step(timeline).has_value());
  EXPECT_THAT(placement_rows(timeline, 1).blocks, IsEmpty());
}

}  // namespace echelon::timeline::pipeline_blocks_test
