// The report as a browser draws it.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <nlohmann/json.hpp>

#include "echelon/timeline/chrome_trace.h"
#include "echelon/timeline/overlap.h"
#include "sample_run.h"
#include "tests/support/python.h"
#include "tests/support/temp_folder.h"

namespace echelon {
namespace {

using Json = nlohmann::json;

bool has_chromium() {
  return std::system("command -v chromium >/dev/null 2>&1") == 0;
}

class ReportInBrowser : public testing::Test {
 protected:
  void SetUp() override {
    ECHELON_NEED_PYTHON();
    if (!has_chromium()) {
      GTEST_SKIP() << "needs Chromium: run `make extras` once";
    }
  }

  void look(const std::string& check, const ReportInput& input) {
    write_report(folder_.path("report.html"), input);
    EXPECT_NO_THROW(run_python_script(
        "timeline/report_browser.py", {check, folder_.path()}));
  }

  TempFolder folder_;
};

ReportInput typical() {
  return sample::run({.ranks = 4, .slow_rank = 0.12});
}

ReportInput huge() {
  return sample::run(
      {.steps = 100'000, .ranks = 64, .buckets = 40, .layers = 60});
}

// Texts and figures that a page must survive.
ReportInput hostile() {
  auto input = sample::run({.steps = 40, .ranks = 2});
  const std::string text =
      "<script>document.title='run'</script>\"' onload=x &amp; \x01\xff "
      "</title></style><b>";
  input.title = text + std::string(300, 'w');
  input.facts.push_back({text, text + std::string(400, 'x')});
  input.facts.push_back({std::string(200, 'W'), ""});
  input.outcome = "stopped: " + text + std::string(200, 'W');
  input.timeline.rank_names[0] = text;
  for (auto& span : input.timeline.spans) span.name += text;
  input.metrics[20].loss = std::numeric_limits<double>::quiet_NaN();
  input.metrics[21].loss = std::numeric_limits<double>::infinity();
  input.metrics[22].samples_per_second = 1e300;
  return input;
}

Json times(const Intervals& intervals) {
  Json result = Json::array();
  for (const auto& [begin, end] : intervals) result.push_back({begin, end});
  return result;
}

Intervals
of_kind(const Timeline& timeline, const StepActivity& activity, SpanKind kind) {
  Intervals result;
  for (const auto& span : timeline.spans) {
    if (span.rank == activity.rank && span.step == activity.step &&
        span.kind == kind) {
      result.push_back({span.begin_ns, span.end_ns});
    }
  }
  return result;
}

// What the picture of `step` must show.
Json picture_of(const Timeline& timeline, int64_t step) {
  Json expected = {
      {"id", "step-" + std::to_string(step)}, {"ranks", Json::array()}};
  Interval window = {std::numeric_limits<int64_t>::max(), 0};
  for (const auto& activity : step_activities(timeline)) {
    if (activity.step != step) continue;
    window.begin = std::min(window.begin, activity.window.begin);
    window.end = std::max(window.end, activity.window.end);
    const auto kind = [&](SpanKind k) {
      return times(of_kind(timeline, activity, k));
    };
    expected["ranks"].push_back(
        {{"rank", activity.rank},
         {"ov", times(activity.overlapped)},
         {"ex", times(activity.exposed)},
         {"da", kind(SpanKind::data)},
         {"fw", kind(SpanKind::forward)},
         {"bw", kind(SpanKind::backward)},
         {"op", kind(SpanKind::optimizer)}});
  }
  expected["window"] = {window.begin, window.end};
  return expected;
}

// One step alone, so that it is the one drawn.
ReportInput one_step(int32_t ranks) {
  auto input =
      sample::run({.ranks = ranks, .recorded_steps = 3, .slow_rank = 0.2});
  std::erase_if(
      input.timeline.spans, [](const Span& span) { return span.step != 2; });
  return input;
}

TEST_F(ReportInBrowser, DrawsBarsAndOverlapsOfEachRankWhereTheyWere) {
  for (const int32_t ranks : {1, 3, 20}) {
    const auto input = one_step(ranks);
    folder_.write("expected.json", picture_of(input.timeline, 2).dump());
    look("drawing", input);
  }
}

TEST_F(ReportInBrowser, DrawsAPointForEachValue) {
  auto input = sample::run({.steps = 150});
  const auto count = input.evaluations.size();
  Json curves = {
      {"loss", {150, count}},
      {"accuracy", {count}},
      {"throughput", {150}},
      {"learning-rate", {150}},
      {"grad-norm", {150}}};
  folder_.write("expected.json", Json{{"curves", curves}}.dump());
  look("curves", input);

  // 360 stretches; the band of the extremes goes there and back.
  input = sample::run({.steps = 5000});
  curves["loss"] = {360, 720, input.evaluations.size()};
  curves["accuracy"] = {input.evaluations.size()};
  curves["throughput"] = curves["grad-norm"] = {240, 480};
  curves["learning-rate"] = {240};
  folder_.write("expected.json", Json{{"curves", curves}}.dump());
  look("curves", input);
}

TEST_F(ReportInBrowser, KeepsTextsApartAtEachWidth) {
  look("layout", typical());
}

TEST_F(ReportInBrowser, KeepsTextsApartInAHugeRun) {
  look("layout", huge());
}

TEST_F(ReportInBrowser, KeepsTextsApartWithOneRank) {
  auto input = sample::run({.steps = 7, .ranks = 1});
  input.evaluations.clear();
  look("layout", input);
}

TEST_F(ReportInBrowser, KeepsTextsApartWithSixteenRanks) {
  look("layout", sample::run({.steps = 9999, .ranks = 16}));
}

TEST_F(ReportInBrowser, KeepsHostileTextsInTheirBoxes) {
  look("layout", hostile());
}

TEST_F(ReportInBrowser, AsksNothingAndNeedsNoScript) {
  look("quiet", typical());
  look("quiet", hostile());
  look("quiet", {.title = "ended before its first step"});
}

TEST_F(ReportInBrowser, HasContrastInLightDarkAndPrint) {
  look("colors", typical());
}

TEST_F(ReportInBrowser, HasNamesForItsPicturesAndPrints) {
  look("structure", typical());
}

TEST(TraceSchema, HoldsForTracesOfRuns) {
  ECHELON_NEED_PYTHON();
  TempFolder folder;
  auto timeline = hostile().timeline;
  timeline.spans.push_back(
      {1, "loader", "decode", SpanKind::data, -5, 2'000'000'001, -1, 0});
  write_chrome_trace(folder.path("a.json"), timeline);
  write_chrome_trace(folder.path("b.json"), {});
  write_chrome_trace(folder.path("c.json"), typical().timeline);
  EXPECT_NO_THROW(run_python_script(
      "timeline/trace_schema.py",
      {folder.path("a.json"), folder.path("b.json"), folder.path("c.json")}));
}

}  // namespace
}  // namespace echelon
