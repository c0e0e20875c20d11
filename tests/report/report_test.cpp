#include "echelon/report/report.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <regex>

#include "echelon/error.h"
#include "echelon/report/chart.h"
#include "echelon/report/lanes.h"
#include "echelon/report/markup.h"
#include "echelon/text/units.h"
#include "tests/report/page_text.h"
#include "tests/report/sample_pipeline.h"
#include "tests/report/sample_run.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::report::report_test {

using sample::contains;
using sample::count;
using sample::expect_no_parts;
using sample::expect_parts;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(Units, AreWhatPeopleRead) {
  const std::pair<double, const char*> numbers[] = {
      {0, "0"},           {1, "1"},
      {0.0412, "0.0412"}, {3.14159, "3.14"},
      {128.4, "128"},     {99.96, "100"},
      {12345, "12,345"},  {-2.5, "-2.5"},
      {0.0001, "1e-4"},   {1.234e-5, "1.23e-5"},
      {2e299, "2e299"},   {1234567, "1.23e6"},
      {kNan, "nan"},      {-INFINITY, "-inf"}};
  for (const auto& [value, text] : numbers) {
    EXPECT_EQ(format_number(value), text);
  }
  const std::pair<double, const char*> seconds[] = {
      {0, "0 s"},           {85e-9, "85 ns"},    {12.5e-6, "12.5 µs"},
      {0.99996e-3, "1 ms"}, {3.2e-3, "3.2 ms"},  {0.9999, "1 s"},
      {59.9, "59.9 s"},     {125, "2 min 05 s"}, {11220, "3 h 07 min"},
      {-0.5, "-500 ms"}};
  for (const auto& [value, text] : seconds) {
    EXPECT_EQ(format_seconds(value), text);
  }
  const std::pair<double, const char*> shares[] = {
      {0, "0 %"},    {0.0005, "< 0.1 %"}, {0.065, "6.5 %"},     {0.08, "8 %"},
      {0.5, "50 %"}, {0.975, "97.5 %"},   {0.9996, "> 99.9 %"}, {1, "100 %"}};
  for (const auto& [value, text] : shares) {
    EXPECT_EQ(format_percent(value), text);
  }
  EXPECT_EQ(format_count(-1234567.4), "-1,234,567");
  EXPECT_EQ(format_count(-0.2), "0");
  EXPECT_EQ(counted(1, "step"), "1 step");
  EXPECT_EQ(counted(5120, "step"), "5,120 steps");
  EXPECT_EQ(counted(0, "batch"), "0 batches");
  EXPECT_EQ(counted(2, "class"), "2 classes");
  EXPECT_EQ(format_compact(9999), "9,999");
  EXPECT_EQ(format_compact(12500), "12.5k");
  EXPECT_EQ(format_compact(999'600), "1M");
  EXPECT_EQ(format_clock(42.4), "0:42");
  EXPECT_EQ(format_clock(11220), "3:07:00");
  EXPECT_EQ(format_clock(2 * 86400 + 3 * 3600 + 900), "2d 03:15");
  EXPECT_EQ(format_clock(-1), "-:--");
  EXPECT_EQ(format_bytes(1023), "1,023 B");
  EXPECT_EQ(format_bytes(1536), "1.5 KiB");
  EXPECT_EQ(format_bytes(25 << 20), "25 MiB");
}

// Three experts; the load of one grows from step to step.
TEST(Report, DrawsTheLoadOfExperts) {
  ReportInput input = sample::run({.steps = 30});
  EXPECT_FALSE(contains(to_html(input), "id=\"experts\""));
  for (auto& step : input.metrics) {
    std::vector<timeline::ExpertLoads> loads = timeline::expert_loads(
        {"model.layers.0.mlp", "model.layers.1.mlp"},
        {10, 10, 10, 10, 10, 10 + step.step, 0, 0, 0, 0, 0, step.step / 2});
    step.expert_imbalance = timeline::imbalance_of(loads);
    step.dropped_share = timeline::dropped_share(loads);
    if (step.step % 10 == 0) step.expert_loads = loads;
  }
  const auto page = to_html(input);
  expect_parts(
      page,
      {"Load of the experts",
       "expert 2 of model.layers.1.mlp had 2 times the mean load",
       "last it dropped most of expert 2 of model.layers.1.mlp, 38",
       "Dropped choices, per cent",
       // The least even layer first: a row of three columns for each expert.
       "<figure class=\"chart\" id=\"experts-0\"><figcaption><h3>model"
       ".layers.1.mlp</h3>",
       "<path class=\"ex\" d=\"M2 2H3V3H2Z\">", "viewBox=\"0 0 3 3\""});
  // Many experts, layers and steps stay a small page.
  std::vector<std::string> layers;
  for (int i = 0; i < 58; ++i)
    layers.push_back(format("model.layers.{}.mlp", i));
  for (auto& step : input.metrics) {
    std::vector<int64_t> counts(58 * 256 * 2);
    for (size_t i = 0; i < counts.size() / 2; ++i) {
      counts[i] = static_cast<int64_t>(i * i * 7 % 113) + step.step;
    }
    step.expert_loads = timeline::expert_loads(layers, counts);
  }
  const auto large = to_html(input);
  EXPECT_LT(large.size(), page.size() + 150'000);
  expect_parts(
      large, {"the fullest of 4 experts",
              "Shown are the 4 layers of 58 with the largest loads"});
}

TEST(Markup, EscapesTextsAndAttributes) {
  EXPECT_EQ(
      escape_markup("<a href=\"x\">'&'</a>"),
      "&lt;a href=&quot;x&quot;&gt;&#39;&amp;&#39;&lt;/a&gt;");
  EXPECT_EQ(
      escape_markup("\xe2\x82\xac \xf0\x9f\x98\x80 \n"),
      "\xe2\x82\xac \xf0\x9f\x98\x80 \n");
  // Each byte that is not UTF-8, or not allowed in a page, becomes one U+FFFD.
  for (const char* bad : {"\xff", "\x01", "\x7f", "\xc0", "\xe2"}) {
    EXPECT_EQ(escape_markup(bad), "\xef\xbf\xbd");
  }
  EXPECT_EQ(escape_markup("\xc0\xaf"), "\xef\xbf\xbd\xef\xbf\xbd");
  EXPECT_EQ(count(escape_markup("\xed\xa0\x80"), "\xef\xbf\xbd"), 3u);
  EXPECT_EQ(count(escape_markup("\xf4\x90\x80\x80"), "\xef\xbf\xbd"), 4u);
  EXPECT_EQ(escape_markup(std::string_view("\0", 1)), "\xef\xbf\xbd");
}

TEST(Markup, FillsTemplatesAndEscapesArguments) {
  Markup page;
  page.add("<p class='{}'><b>{}</b> it's {}", "\"a\"", "x<y", size_t{3});
  page.add("</p><rect x='{}'/>", 1.0 / 3).add_json("{\"a\":\"</script>\"}");
  EXPECT_EQ(
      std::move(page).finish(),
      "<p class=\"&quot;a&quot;\"><b>x&lt;y</b> it's 3</p>"
      "<rect x=\"0.33\"/><script type=\"application/json\">"
      "{\"a\":\"\\u003c/script>\"}</script>");
}

TEST(Markup, RejectsElementsThatDoNotNest) {
  Markup open;
  open.add("<p>");
  EXPECT_THROW(open.add("</b>"), InternalError);
  EXPECT_THROW(std::move(open).finish(), InternalError);
  EXPECT_THROW(Markup().add("</p>"), InternalError);
}

TEST(Coordinate, HasNoTrailingZeros) {
  EXPECT_EQ(coordinate(-0.001), "0");
  EXPECT_EQ(coordinate(12.50), "12.5");
  EXPECT_EQ(coordinate(kNan), "0");
}

TEST(Series, KeepsTheExtremesOfEachStretch) {
  std::vector<Point> points;
  for (int i = 0; i < 10'000; ++i) {
    points.push_back({double(i), i == 4'321 ? 50 : i == 7'000 ? -9 : 1.0});
  }
  points[100].y = kNan;
  const auto buckets = to_buckets(points, 300);
  ASSERT_EQ(buckets.size(), 300u);
  double low = 0;
  double high = 0;
  for (const auto& b : buckets) {
    low = std::min(low, b.low);
    high = std::max(high, b.high);
    if (b.high == 50) {
      EXPECT_LE(b.first_x, 4'321);
      EXPECT_GE(b.last_x, 4'321);
    }
  }
  EXPECT_EQ(low, -9);
  EXPECT_EQ(high, 50);
  EXPECT_EQ(buckets.front().first_x, 0);
  EXPECT_EQ(buckets.back().last_x, 9'999);
}

TEST(Series, TheSmoothedCurveNeitherLagsNorBends) {
  std::vector<Point> line;
  for (int i = 0; i < 1000; ++i) line.push_back({double(i), 3.0 * i});
  for (const auto& b : to_buckets(line, 100)) {
    EXPECT_NEAR(b.smooth, b.mean, 1e-6);
  }
  // A spike is spread over its surroundings, and its area is kept.
  auto spike = line;
  for (auto& p : spike) p.y = p.x == 500 ? 1000 : 0;
  double area = 0;
  for (const auto& b : to_buckets(spike, 1000)) {
    EXPECT_LT(b.smooth, 70);
    EXPECT_EQ(
        std::abs(b.first_x - 500) > 40 && std::abs(b.smooth) > 1e-9, false);
    area += b.smooth;
  }
  EXPECT_NEAR(area, 1000, 1e-6);
  EXPECT_TRUE(to_buckets({}, 10).empty());
  EXPECT_TRUE(to_buckets({{0, kNan}}, 10).empty());
  EXPECT_EQ(to_buckets({{4, 2}}, 10).at(0).smooth, 2);
}

TEST(Series, TicksAreRound) {
  EXPECT_THAT(
      linear_ticks(0, 1, 5),
      ElementsAre(0, 0.2, 0.4, testing::DoubleEq(0.6000000000000001), 0.8, 1));
  EXPECT_THAT(linear_ticks(-7, 23, 4), ElementsAre(0, 10, 20));
  EXPECT_THAT(whole_ticks(0, 3, 6), ElementsAre(0, 1, 2, 3));
  // A step of 5 has one multiple in these ranges.
  EXPECT_THAT(whole_ticks(11, 19, 3), ElementsAre(12, 14, 16, 18));
  EXPECT_EQ(linear_ticks(1.1, 1.9, 2).size(), 4u);
  EXPECT_THAT(
      log_ticks(0.03, 3),
      ElementsAre(
          testing::DoubleNear(0.05, 1e-9), testing::DoubleNear(0.1, 1e-9),
          testing::DoubleNear(0.2, 1e-9), testing::DoubleNear(0.5, 1e-9), 1,
          2));
  EXPECT_EQ(tick_decimals({0, 0.5}), 1);
  EXPECT_EQ(tick_decimals({0, 0.05}), 2);
  EXPECT_EQ(tick_decimals({0, 20}), 0);
}

TEST(Report, SaysTheHeadlineFigures) {
  auto input = sample::run({.steps = 100, .ranks = 2});
  for (size_t i = 90; i < 100; ++i) {
    input.metrics[i].loss = i % 2 == 0 ? 0.1134 : 0.1334;
  }
  input.evaluations.back().accuracy = 0.975;
  input.evaluations.back().samples = 360;
  input.total_seconds = 33;
  const auto page = to_html(input);
  expect_parts(
      page, {"<h1>simple_cnn on digits</h1>", ">0.123</dd>",
             ">mean of 10 steps, to step 100</dd>", ">97.5<small>",
             ">of 360 samples</dd>", ">33<small>",
             "of the step is exposed communication"});
}

TEST(Report, OfTextsSpeaksOfTokens) {
  auto input = sample::run({.steps = 100, .ranks = 2});
  for (auto& m : input.metrics) m.tokens_per_second = 81920;
  for (auto& e : input.evaluations) {
    e.tokens = 4096;
    e.perplexity = 40;
  }
  input.evaluations.back().perplexity = 12.31;
  input.evaluations.back().accuracy = 0.411;
  const auto page = to_html(input);
  expect_parts(
      page, {">Held-out perplexity</dt>", ">12.3</dd>",
             " of 4,096 tokens right</dd>", ">81,920</dd>", "tokens/s, median",
             "Tokens per second", "id=\"perplexity\""});
  expect_no_parts(page, {"id=\"accuracy\"", "amples per second"});
}

// The targets of all links of a page.
std::vector<std::string> links_of(const std::string& page) {
  constexpr std::string_view kLink = " href=\"";
  std::vector<std::string> links;
  for (size_t at = 0; (at = page.find(kLink, at)) != page.npos;) {
    at += kLink.size();
    links.push_back(page.substr(at, page.find('"', at) - at));
  }
  return links;
}

TEST(Report, ListsItsSectionsAndLinksToNothingElse) {
  const auto html = to_html(sample::run_with_memory({}));
  const auto links = links_of(html);
  EXPECT_GE(links.size(), 4u);
  for (const auto& link : links) {
    EXPECT_EQ(link.front(), '#') << link;
    EXPECT_TRUE(contains(html, "id=\"" + link.substr(1) + "\"")) << link;
  }
  expect_parts(
      html, {"</header><nav class=\"contents\"",
             "<a href=\"#time\">Where the time went</a>"});
  // A short page has no need of them.
  ReportInput small{.title = "small", .facts = {{"Model", "mlp"}}};
  expect_no_parts(to_html(small), {"<nav"});
}

TEST(Report, AsksNothingOfTheNetworkAndRunsNoScript) {
  const auto page = to_html(sample::run({}));
  EXPECT_TRUE(contains(page, "content=\"default-src 'none'; "));
  expect_no_parts(
      page, {"<script", "<link", "<img", "http:", "https:", "@import", "src="});
}

TEST(Report, IsSmallForALongRunOfManyRanks) {
  const auto page = to_html(sample::run(
      {.steps = 100'000, .ranks = 64, .buckets = 40, .layers = 60}));
  EXPECT_LT(page.size(), 500'000u);
  for (int rank = 0; rank < 64; ++rank) {
    EXPECT_TRUE(contains(page, "data-rank=\"" + std::to_string(rank) + "\""));
  }
}

TEST(Report, DrawsMemoryByKind) {
  const std::string page = to_html(sample::run_with_memory({.ranks = 2}));
  EXPECT_TRUE(contains(page, "Memory over a step, by kind"));
  // Activations of 520 MiB when forward ends, with what is there then.
  EXPECT_TRUE(contains(page, "Rank 1 holds most: 957 MiB, of which "))
      << page.substr(page.find("holds most") - 10, 60);
  expect_parts(page, {"plan 1.12 GiB", "limit 1.46 GiB", "memory-0-d"});
  EXPECT_EQ(count(page, "class=\"ma\""), 3u);  // two areas and the legend
  EXPECT_EQ(count(page, "class=\"mc\""), 0u);
  EXPECT_FALSE(
      contains(to_html(sample::run({})), "Memory over a step, by kind"));
}

TEST(Report, ShowsPredictionAndMeasurementSideBySide) {
  auto input = sample::run_with_memory({.ranks = 2});
  EXPECT_FALSE(contains(to_html(input), "Prediction"));
  input.prediction = sample::prediction_of(input.timeline);
  const std::string page = to_html(input);
  expect_parts(
      page, {"<h2>Prediction and measurement</h2>",
             "On h100-sxm:1x8 a step was predicted to take ",
             "id=\"prediction\"", ">measured</text>", ">predicted</text>"});
  const timeline::TimedParts real =
      timeline::timed_parts(input.timeline, timeline::diagnose(input.timeline));
  for (const auto& part :
       timeline::compared_parts(input.prediction->parts, real)) {
    const bool any = part.predicted > 0;
    const std::string row = format(
        ">{}</th><td>{}</td><td>{}</td><td>{}", part.name,
        any ? format_seconds(part.predicted) : "\u2013",
        format_seconds(part.measured),
        any ? format("{:.2f}", part.measured / part.predicted) : "\u2013");
    EXPECT_TRUE(contains(page, row)) << row;
  }
  // The prediction was a sixteenth less than 957 MiB.
  expect_parts(
      page, {">rank 1</th><td>897 MiB</td><td>957 MiB</td><td>1.07</td>",
             ">activations</th><td>"});
}

TEST(Report, SaysWhyNothingIsPredicted) {
  auto input = sample::run({.steps = 30, .ranks = 2});
  input.prediction = StepPrediction{.missing = "No <rates> of this machine."};
  const std::string page = to_html(input);
  expect_parts(
      page, {"<h2>Prediction and measurement</h2>",
             "No &lt;rates&gt; of this machine."});
  EXPECT_FALSE(contains(page, "id=\"prediction\""));
}

TEST(Report, CallsNothingOfASimulationMeasured) {
  auto input = sample::run({.steps = 30});
  input.timeline = sample::pipeline_run({.slow_stage = 0.15});
  EXPECT_TRUE(contains(to_html(input), "Measured: step "));
  input.timeline.simulated = true;
  for (auto& step : input.metrics) step.simulated = true;
  input.prediction = sample::prediction_of(input.timeline);
  const std::string page = to_html(input);
  expect_no_parts(
      page, {"easured", "real step", "training run", "Recorded", "recorded"});
  expect_parts(
      page, {"Simulated: step ", "simulated run", "<h2>Prediction</h2>"});
  // One of several ranks that are alike is shown.
  input.prediction->memory = {{.rank = 0}, {.rank = 1}, {.rank = 2}};
  for (auto& rank : input.prediction->memory) rank.memory.bytes[0] = 1 << 20;
  input.prediction->memory[1].memory.bytes[0] = 5 << 20;
  const std::string alike = to_html(input);
  expect_parts(
      alike,
      {">rank 0 and 1 other</th>", ">rank 1</th><td>5 MiB</td><td></td>"});
  EXPECT_FALSE(contains(alike, ">rank 2</th><td>1 MiB</td>"));
}

TEST(Report, PredictionsOfManyRanksStaySmall) {
  auto input = sample::run_with_memory({.ranks = 64});
  input.timeline.memory.resize(64);
  auto without = input;
  input.prediction = sample::prediction_of(input.timeline);
  const std::string page = to_html(input);
  EXPECT_LT(page.size(), to_html(without).size() + 10'000);
  EXPECT_LT(page.size(), 500'000u);
  EXPECT_TRUE(contains(page, "The 8 ranks of 64 that hold most."));
}

TEST(Report, MemoryOfManyRanksStaysSmall) {
  const auto input = sample::run_with_memory({.ranks = 32});
  auto without = input;
  without.timeline.memory.clear();
  const std::string page = to_html(input);
  EXPECT_LT(page.size(), to_html(without).size() + 100'000);
  EXPECT_LT(page.size(), 500'000u);
  EXPECT_EQ(count(page, "class=\"chart memory\""), 4u);
  EXPECT_TRUE(contains(page, "the 4 ranks of 32 that hold most"));
}

TEST(Report, EscapesEveryText) {
  const std::string evil = "<script>alert(1)</script>\"'";
  auto input = sample::run({.steps = 30, .ranks = 2});
  input.title = input.outcome = evil;
  input.facts = {{evil, evil}};
  for (auto& name : input.timeline.rank_names) name = evil;
  for (auto& span : input.timeline.spans) {
    span.name = evil;
    span.track += evil;
  }
  EXPECT_FALSE(contains(to_html(input), "<script"));
}

TEST(Report, LeavesOutWhatWasNotMeasured) {
  const auto page = to_html({.title = "nothing"});
  expect_no_parts(page, {"<figure", "<table", "<h2"});
  auto input = sample::run({.steps = 30, .ranks = 1});
  input.evaluations.clear();
  for (auto& m : input.metrics) m.grad_norm.reset();
  const auto other = to_html(input);
  expect_no_parts(
      other, {"id=\"accuracy\"", "id=\"grad-norm\"", "class=\"ex\" x=\""});
  EXPECT_TRUE(contains(other, "id=\"throughput\""));
}

TEST(Report, SurvivesFiguresOfAnySize) {
  auto input = sample::run({.steps = 30, .ranks = 2});
  for (double value :
       {0.0, -1.0, 1e-300, 1e300, 1.7e308, -1.7e308, kNan, HUGE_VAL,
        -HUGE_VAL}) {
    for (auto& m : input.metrics) {
      m.loss = m.samples_per_second = m.learning_rate = value;
      m.grad_norm = m.step_seconds = value;
    }
    const auto page = to_html(input);
    EXPECT_FALSE(contains(page, "=\"nan")) << value;
    EXPECT_FALSE(contains(page, "=\"inf")) << value;
    EXPECT_LT(page.size(), 200'000u);
  }
}

TEST(Report, SaysWhereTheLossWasNotFinite) {
  auto input = sample::run({.steps = 30, .ranks = 1});
  input.metrics[12].loss = kNan;
  EXPECT_TRUE(contains(to_html(input), "not a finite number at step 13"));
}

TEST(Report, AFileThatCannotBeWrittenIsNamed) {
  TempFolder folder;
  write_report(folder.path("a/b/report.html"), {.title = "x"});
  EXPECT_TRUE(
      contains(read_file(folder.path("a/b/report.html")), "<h1>x</h1>"));
  const auto file = folder.write("file", "");
  EXPECT_THAT(
      error_text([&] { write_report(file + "/report.html", {.title = "x"}); }),
      HasSubstr("cannot write " + file + "/report.html"));
}

TEST(Report, ShowsWhatHeldTheRunBack) {
  ReportInput input{.title = "found"};
  expect_no_parts(to_html(input), {"held the run back", "id=\"findings\""});
  input.findings.emplace();
  EXPECT_TRUE(contains(to_html(input), "Nothing was found that held it back"));
  input.findings->largest_wait = "The largest wait is 14 % of the step.";
  EXPECT_TRUE(contains(
      to_html(input),
      "that held it back. The largest wait is 14\u00a0% of the step.</p>"));
  input.findings->findings = {
      {.title = "data loading, 31 % of the step",
       .diagnosis = "Rank 1 <waits>; see `echelon bench` and `uptime`.",
       .fix = "Load on more threads.",
       .settings = "[data]\nworkers = 4\n",
       .why = "They overlap",
       .gain = "30 % of the step, from the recorded times"}};
  input.findings->notes = {"an odd ` stays, `code` does not"};
  const auto page = to_html(input);
  expect_parts(
      page, {"<h3>data loading, 31 % of the step</h3>",
             "Rank 1 &lt;waits&gt;; see <code>echelon bench</code> and "
             "<code>uptime</code>.",
             "<pre>[data]\nworkers = 4\n</pre>",
             "Note: an odd <code> stays, </code>code` does not."});
  expect_no_parts(page, {"Nothing was found"});
}

// Ranks that are out of phase make a picture longer than their step.
TEST(Report, TypicalStepIsAsLongAsItsPicture) {
  ReportInput input{.title = "phase"};
  const auto add = [&](int64_t step, int64_t phase, int64_t length) {
    for (int32_t rank = 0; rank < 2; ++rank) {
      const int64_t begin = step * 100'000'000 + rank * phase;
      input.timeline.spans.push_back(
          {.rank = rank,
           .track = "compute",
           .name = "forward",
           .kind = timeline::SpanKind::forward,
           .begin_ns = begin,
           .end_ns = begin + length,
           .step = step});
    }
  };
  for (int64_t step = 1; step <= 5; ++step) {
    add(step, step == 4 ? 0 : 7'000'000, 10'000'000 + step);
  }
  EXPECT_TRUE(contains(to_html(input), ">Step 4, a typical one: 10 ms<"));
  input.timeline.spans.clear();
  for (int64_t step = 1; step <= 5; ++step) add(step, 7'000'000, 10'000'000);
  EXPECT_TRUE(contains(
      to_html(input),
      ">Step 3, a typical one: 17 ms over all ranks, which are out of phase; "
      "10 ms a rank<"));
  // Lengths vary, and the one step in phase is in the middle half of them.
  input.timeline.spans.clear();
  for (int64_t step = 1; step <= 8; ++step) {
    add(step, step == 6 ? 0 : 7'000'000, 10'000'000 + step * 1'000'000);
  }
  EXPECT_TRUE(contains(to_html(input), ">Step 6, a typical one: 16 ms<"));
}

TEST(Report, TicksOfASmallAxisStayOnNarrowScreens) {
  const auto ticks_of = [](size_t count) {
    Markup page;
    for (size_t i = 0; i < count; ++i) draw_tick(page, i, count, 0, 0, "");
    return std::move(page).finish();
  };
  EXPECT_EQ(sample::count(ticks_of(2), "\"tick minor\""), 0u);
  EXPECT_EQ(sample::count(ticks_of(3), "\"tick minor\""), 1u);
}

TEST(Report, CountsOneAsOne) {
  ReportInput input{.title = "one"};
  input.metrics = {{.step = 1, .loss = 1, .step_seconds = 0.5}};
  EXPECT_TRUE(contains(to_html(input), ">1 step<"));
  // Means of calls are sums of shares.
  for (int64_t step = 1; step <= 3; ++step) {
    input.timeline.spans.push_back(
        {.track = "comm",
         .name = "all_reduce bucket 0",
         .kind = timeline::SpanKind::communication,
         .begin_ns = step * 1000,
         .end_ns = step * 1000 + 500,
         .step = step,
         .axis = "dp_replicate"});
  }
  EXPECT_TRUE(contains(to_html(input), "makes 1 call on dp"));
}

// Calls shorter than a pixel: their share of the time is their share of the
// lane, and nothing is left out.
TEST(Lanes, StacksWhatIsTooShortToDraw) {
  timeline::Timeline timeline;
  for (int64_t i = 0; i < 5000; ++i) {  // 60 ns compute, 30 exposed, 10 idle
    const auto add = [&](timeline::SpanKind kind, const char* track,
                         int64_t begin, int64_t end) {
      timeline.spans.push_back(
          {.track = track,
           .name = "call",
           .kind = kind,
           .begin_ns = 100 * i + begin,
           .end_ns = 100 * i + end,
           .step = 1});
    };
    add(i % 2 == 0 ? timeline::SpanKind::forward : timeline::SpanKind::backward,
        "compute", 0, 60);
    add(timeline::SpanKind::communication, "comm", 60, 90);
  }
  Markup page;
  const auto lanes = lanes_of(timeline::step_activities(timeline), {});
  draw_lanes(page, "step", "a step", lanes, 1200);
  const auto html = std::move(page).finish();
  const auto area = [&](const std::string& color) {
    const std::regex rect(
        "<rect class=\"" + color +
        "\" x=\"[^\"]*\" y=\"[^\"]*\" width=\"([^%]*)%\" height=\"([^\"]*)\"");
    double sum = 0;
    for (std::sregex_iterator it(html.begin(), html.end(), rect), end;
         it != end; ++it) {
      sum += std::stod((*it)[1]) * std::stod((*it)[2]);
    }
    return sum;
  };
  EXPECT_NEAR(area("fw"), 0.30 * 100 * 18, 5);
  EXPECT_NEAR(area("bw"), 0.30 * 100 * 18, 5);
  EXPECT_NEAR(area("ex"), 0.30 * 100 * 11, 5);
  EXPECT_LT(count(html, "<rect"), 1900u);
}

TEST(Lanes, RanksThatDidTheSameAreOne) {
  timeline::Timeline timeline;
  for (int32_t rank = 0; rank < 4; ++rank) {
    timeline.spans.push_back(
        {.rank = rank,
         .track = "compute",
         .name = "forward",
         .kind = timeline::SpanKind::forward,
         .end_ns = rank == 3 ? 90 : 100,
         .step = 1});
  }
  const auto names = [&](const std::vector<int32_t>& classes) {
    std::vector<std::string> list;
    for (const auto& lane :
         lanes_of(timeline::step_activities(timeline), classes)) {
      list.push_back(lane.name);
    }
    return list;
  };
  EXPECT_THAT(names({}), ElementsAre("ranks 0\u20132", "rank 3"));
  EXPECT_THAT(
      names({0, 0, 0, 1, 0, 0, 1}), ElementsAre("rank 0 + 4", "rank 3 + 1"));
  EXPECT_EQ(ranks_text({7}), "rank 7");
}

}  // namespace echelon::report::report_test
