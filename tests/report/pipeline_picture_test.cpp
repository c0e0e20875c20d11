#include "echelon/report/pipeline_page.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>

#include "echelon/report/report.h"
#include "tests/report/page_text.h"
#include "tests/report/sample_pipeline.h"
#include "tests/report/sample_run.h"

namespace echelon::report::pipeline_picture_test {

using sample::contains;
using sample::count;
using sample::expect_parts;
using sample::Order;
using sample::schedule_picture;
using testing::HasSubstr;

// Counts the blocks in the player's data.
size_t num_blocks(const std::string& page) {
  size_t result = 0;
  for (const char kind : {'f', 'b', 'i', 'w', 't'}) {
    result += count(page, format("[\"{}\",", kind));
  }
  return result;
}

TEST(PipelinePicture, HasABlockForEachAction) {
  const auto page = pipeline_page(schedule_picture({}));
  EXPECT_EQ(count(page, "class=\"pf0\" x="), 32u);
  EXPECT_EQ(count(page, "class=\"pb0\" x="), 32u);
  EXPECT_EQ(count(page, "class=\"prow\""), 4u);
  expect_parts(
      page,
      {"bubble <b>27\u00a0%</b>", ">33 forwards<", "1f1b &lt;4 stages&gt;"});
  EXPECT_FALSE(contains(page, "1f1b <4"));
}

TEST(PipelinePicture, ChunksHaveShadesAndSplitBackwardsLetters) {
  const auto looped =
      pipeline_page(schedule_picture({.order = Order::interleaved}));
  EXPECT_EQ(count(looped, "class=\"pf0\" x="), 32u);
  EXPECT_EQ(count(looped, "class=\"pf3\" x="), 32u);
  const auto split = pipeline_page(schedule_picture({.order = Order::split}));
  EXPECT_EQ(count(split, "class=\"pi0\" x="), 32u);
  EXPECT_EQ(count(split, "class=\"pw0\" x="), 32u);
  expect_parts(
      split, {">I7</text>", ">W7</text>",
              "backward for weights of microbatch 7, stage 3"});
}

TEST(PipelinePicture, BeyondTheLimitsItSaysWhatIsDrawn) {
  auto picture = schedule_picture({.ranks = 100, .microbatches = 300});
  const auto page = pipeline_page(picture);
  EXPECT_LT(page.size(), 500'000u);
  EXPECT_LE(num_blocks(page), 3000u);
  EXPECT_GT(num_blocks(page), 2900u);
  EXPECT_EQ(count(page, "class=\"prow\""), 64u);
  EXPECT_TRUE(contains(page, "Drawn: the first 64 of 100 rows, the first "));
  // Figures are of the whole: 99 of 399 slots.
  expect_parts(page, {"bubble <b>25\u00a0%</b>", ">1,197 forwards<"});
  EXPECT_FALSE(contains(pipeline_page(schedule_picture({})), "Drawn:"));
}

TEST(PipelinePicture, FiguresGivenForAWholeAreKept) {
  auto picture = schedule_picture({});
  picture.bubble = 0.13;
  picture.makespan = 1000;
  const auto page = pipeline_page(picture);
  expect_parts(
      page, {"bubble <b>13\u00a0%</b>", ">1,000 forwards<",
             "Drawn: the first 3.3\u00a0% of the time"});
}

TEST(PipelinePicture, SurvivesBlocksOfAnyKind) {
  auto picture = schedule_picture({});
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const int32_t row : {-1, 4, 1 << 30}) {
    picture.blocks.push_back({.row = row, .end = 1});
  }
  for (const auto& [begin, end] :
       {std::pair(nan, 1.0), {0.0, nan}, {0.0, HUGE_VAL}, {5.0, 4.0}}) {
    picture.blocks.push_back({.begin = begin, .end = end});
  }
  picture.rows[0].name = std::string(300, 'w') + "<script>";
  const auto page = pipeline_page(picture);
  EXPECT_EQ(num_blocks(page), 64u);
  EXPECT_FALSE(contains(page, "nan"));
  EXPECT_EQ(count(page, "<script"), 2u);  // data and code
  EXPECT_FALSE(contains(pipeline_page(PipelinePicture{}), "<figure"));
}

TEST(PlayerSteps, AreTheSlotsOfAnEvenSchedule) {
  const auto steps = player_steps(schedule_picture({}).blocks);
  EXPECT_TRUE(steps.even);
  ASSERT_EQ(steps.moments.size(), 33u);
  EXPECT_NEAR(steps.moments[32], 32.5, 1e-9);
  EXPECT_TRUE(player_steps({}).moments.empty());
}

TEST(PlayerSteps, ShowEachBlockOfARealStep) {
  for (const auto order :
       {Order::gpipe, Order::one_f_one_b, Order::split, Order::interleaved}) {
    const auto timeline =
        sample::pipeline_run({.order = order, .slow_stage = 0.3});
    const auto blocks = timeline::pipeline_rows(timeline, 2).blocks;
    const auto steps = player_steps(blocks);
    EXPECT_FALSE(steps.even);
    EXPECT_TRUE(std::is_sorted(steps.moments.begin(), steps.moments.end()));
    for (const auto& block : blocks) {
      if (block.kind == timeline::BlockKind::transfer) continue;
      const auto shown = std::any_of(
          steps.moments.begin(), steps.moments.end(), [&](double moment) {
            return block.begin <= moment && moment < block.end;
          });
      EXPECT_TRUE(shown) << block.begin << " to " << block.end;
    }
  }
}

TEST(PipelineSection, ExplainsWhatTheRealStepLoses) {
  // With even stages only transfers cost time; with one slow stage, unequal
  // blocks cost most of it.
  const auto even =
      pipeline_pictures(sample::pipeline_run({.latency = 0.4}), "p");
  ASSERT_TRUE(even.has_value());
  EXPECT_EQ(even->pictures.size(), 2u);
  EXPECT_NEAR(*even->ideal_idle, 3.0 / 11, 1e-9);
  EXPECT_GT(even->idle, *even->ideal_idle + 0.05);
  EXPECT_THAT(
      even->sentence, HasSubstr("leaves 27 % of the devices' time idle"));
  EXPECT_THAT(even->sentence, HasSubstr("from transfers and pauses"));
  const auto slow = pipeline_pictures(
      sample::pipeline_run({.slow_stage = 1, .latency = 0}), "p");
  EXPECT_THAT(slow->sentence, HasSubstr("come from blocks of unequal length"));
  EXPECT_THAT(slow->sentence, testing::Not(HasSubstr("from transfers")));
}

TEST(PipelineSection, TheIdealIsScaledToTheWorkOfTheRealStep) {
  const auto pictures =
      pipeline_pictures(sample::pipeline_run({.replicas = 2}), "p")->pictures;
  EXPECT_EQ(pictures.front().rows.size(), 4u);
  EXPECT_EQ(pictures.back().rows.size(), 8u);
  const double ideal = timeline::makespan(pictures.front().blocks);
  const double real = timeline::makespan(pictures.back().blocks);
  EXPECT_LT(ideal, real);
  EXPECT_GT(ideal, 0.8 * real);
}

TEST(PipelineSection, IsInTheReportOfARunThatHasOne) {
  auto input = sample::run({.steps = 20});
  EXPECT_FALSE(contains(to_html(input), "class=\"pipes\""));
  input.timeline = sample::pipeline_run({.replicas = 2});
  auto page = to_html(input);
  expect_parts(
      page,
      {"The pipeline, step by step", "Pipeline bubble", ">pipeline 1</text>"});
  EXPECT_EQ(count(page, "<script"), 2u);  // data and code
  input.timeline = sample::placement_run(4, 3);
  page = to_html(input);
  expect_parts(
      page, {"One device works at a time", "Devices idle", ">device 3</text>"});
}

// Replicas 1 and 2 do the same; replica 3 is of the class of 0, without spans.
TEST(PipelineSection, ASimulationDrawsEqualPipelinesOnce) {
  auto timeline = sample::pipeline_run({.ranks = 2, .replicas = 2, .steps = 1});
  const auto spans = timeline.spans;
  for (auto& span : timeline.spans) span.rank += span.rank / 2 * 2;
  for (auto span : spans) {
    if (span.rank % 2 == 0) continue;
    span.rank += span.rank / 2 * 2 + 1;
    timeline.spans.push_back(span);
  }
  timeline.simulated = true;
  timeline.rank_classes = {0, 1, 1, 0, 2, 3, 3, 2};
  const auto all = pipeline_pictures(timeline, "p");
  const auto& picture = all->pictures.back();
  EXPECT_EQ(picture.title, "Simulated: step 1");
  EXPECT_THAT(
      picture.groups, testing::ElementsAre(
                          "pipeline of rank 0 and 1 equal one",
                          "pipeline of rank 1 and 1 equal one"));
  EXPECT_EQ(picture.rows.size(), 4u);
  EXPECT_THAT(all->sentence, testing::Not(HasSubstr("The picture has")));
  // Each rank by itself: one pipeline of four is not there.
  timeline.rank_classes = {0, 1, 2, 3, 4, 5, 6, 7};
  EXPECT_THAT(
      pipeline_pictures(timeline, "p")->sentence,
      HasSubstr(" The picture has 3 of 4 pipelines."));
  timeline.rank_classes = {0, 0, 0, 0, 1, 1, 1, 1};
  std::erase_if(timeline.spans, [](const timeline::Span& span) {
    return span.rank % 4 == 0;
  });
  EXPECT_EQ(
      pipeline_pictures(timeline, "p")->pictures.back().title,
      "Simulated: step 1, one of 4 equal pipelines");
}

TEST(PipelinePicture, BeyondTheLimitsItDrawsWholePipelines) {
  const auto pictures =
      pipeline_pictures(
          sample::pipeline_run(
              {.ranks = 3, .microbatches = 3, .replicas = 25, .steps = 1}),
          "p")
          ->pictures;
  const auto page = pipeline_page(pictures.back());
  EXPECT_EQ(count(page, "class=\"prow\""), 63u);
  EXPECT_TRUE(contains(page, "Drawn: the first 63 of 75 rows"));
}

TEST(PipelineSection, KeepsAReportOfManyRanksSmall) {
  auto input = sample::run({.steps = 100'000, .ranks = 64});
  input.timeline = sample::pipeline_run({.ranks = 64, .microbatches = 128});
  EXPECT_LT(to_html(input).size(), 500'000u);
  input.timeline = sample::pipeline_run({.ranks = 16, .microbatches = 64});
  EXPECT_LT(to_html(input).size(), 500'000u);
}

}  // namespace echelon::report::pipeline_picture_test
