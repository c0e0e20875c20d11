// The report as a browser draws it.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>

#include "echelon/report/pipeline_page.h"
#include "echelon/report/strategy_page.h"
#include "echelon/text/text_file.h"
#include "echelon/text/units.h"
#include "echelon/timeline/chrome_trace.h"
#include "echelon/timeline/overlap.h"
#include "tests/report/sample_pipeline.h"
#include "tests/report/sample_run.h"
#include "tests/report/sample_tensor.h"
#include "tests/support/python.h"
#include "tests/support/temp_folder.h"

namespace echelon::report::report_browser_test {

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

  // One browser looks at the pages of all tests, since it takes seconds to
  // start. The folder of a page has the name of its test.
  static void TearDownTestSuite() {
    if (!looks_.empty()) {
      EXPECT_NO_THROW(run_python_script("report/report_browser.py", looks_));
    }
    looks_.clear();
    folder_.reset();
  }

  void look(
      const std::string& check, const ReportInput& input,
      const Json& expected = {}) {
    look_at(check, to_html(input), expected);
  }

  // `expected` is what the page must show.
  void look_at(
      const std::string& check, const std::string& page,
      const Json& expected = {}) {
    if (!folder_) folder_ = std::make_unique<TempFolder>();
    const std::string name =
        testing::UnitTest::GetInstance()->current_test_info()->name() +
        std::string("/") + std::to_string(looks_.size());
    folder_->write(name + "/report.html", page);
    folder_->write(name + "/expected.json", expected.dump());
    looks_.insert(looks_.end(), {check, folder_->path(name)});
  }

  static inline std::unique_ptr<TempFolder> folder_;
  static inline std::vector<std::string> looks_;
};

ReportInput typical() {
  return sample::run({.ranks = 4, .slow_rank = 0.12});
}

ReportInput huge() {
  return sample::run(
      {.steps = 100'000, .ranks = 64, .buckets = 40, .layers = 60});
}

Json times(const timeline::Intervals& intervals) {
  Json result = Json::array();
  for (const auto& [begin, end] : intervals) result.push_back({begin, end});
  return result;
}

timeline::Intervals of_kind(
    const timeline::Timeline& timeline, const timeline::StepActivity& activity,
    timeline::SpanKind kind) {
  timeline::Intervals result;
  for (const auto& span : timeline.spans) {
    if (span.rank == activity.rank && span.step == activity.step &&
        span.kind == kind) {
      result.push_back({span.begin_ns, span.end_ns});
    }
  }
  return result;
}

// What the picture of `step` must show.
Json picture_of(const timeline::Timeline& timeline, int64_t step) {
  Json expected = {
      {"id", "step-" + std::to_string(step)}, {"ranks", Json::array()}};
  timeline::Interval window = {std::numeric_limits<int64_t>::max(), 0};
  for (const auto& activity : timeline::step_activities(timeline)) {
    if (activity.step != step) continue;
    window.begin = std::min(window.begin, activity.window.begin);
    window.end = std::max(window.end, activity.window.end);
    const auto kind = [&](timeline::SpanKind k) {
      return times(of_kind(timeline, activity, k));
    };
    expected["ranks"].push_back(
        {{"rank", activity.rank},
         {"ov", times(activity.overlapped)},
         {"ex", times(activity.exposed)},
         {"da", kind(timeline::SpanKind::data)},
         {"fw", kind(timeline::SpanKind::forward)},
         {"bw", kind(timeline::SpanKind::backward)},
         {"op", kind(timeline::SpanKind::optimizer)}});
  }
  expected["window"] = {window.begin, window.end};
  return expected;
}

// What the rectangle `id` must show of `parameter`.
Json rectangle_of(
    const std::string& id, const ParameterShards& parameter, bool vertical) {
  Json stripes = Json::array();
  for (size_t rank = 0; rank < parameter.parts.size(); ++rank) {
    for (const auto& piece : parameter.parts[rank].pieces) {
      stripes.push_back({rank, piece.begin, piece.end});
    }
  }
  const Shard& part = parameter.parts.front();
  return {
      {"id", id},
      {"vertical", vertical},
      {"size", part.shape[static_cast<size_t>(part.dim)]},
      {"stripes", stripes}};
}

// One step alone, so that it is the one drawn.
ReportInput one_step(int32_t ranks) {
  auto input =
      sample::run({.ranks = ranks, .recorded_steps = 3, .slow_rank = 0.2});
  std::erase_if(input.timeline.spans, [](const timeline::Span& span) {
    return span.step != 2;
  });
  return input;
}

std::string label_of(const timeline::PipelineBlock& block) {
  const bool split = block.kind == timeline::BlockKind::backward_input ||
                     block.kind == timeline::BlockKind::backward_weight;
  const bool numbered = block.microbatch >= 0;
  return (split || !numbered ? std::string(1, timeline::letter(block.kind))
                             : "") +
         (numbered ? std::to_string(block.microbatch) : "");
}

// What pictures over one another must show.
Json pipelines_of(const std::vector<PipelinePicture>& pictures) {
  Json expected = {{"figures", Json::array()}};
  double range = 0;
  for (const auto& picture : pictures) {
    Json figure = {{"id", picture.id}, {"blocks", Json::array()}};
    const double bubble =
        timeline::bubble_fraction(picture.blocks, picture.rows.size());
    figure["bubble"] =
        picture.measure_name + " " + unbroken(format_percent(bubble));
    for (const auto& row : picture.rows) figure["rows"].push_back(row.name);
    auto blocks = picture.blocks;
    std::stable_sort(blocks.begin(), blocks.end(), [](auto& a, auto& b) {
      return std::pair(a.row, a.begin) < std::pair(b.row, b.begin);
    });
    for (const auto& block : blocks) {
      figure["blocks"].push_back(
          {{"row", block.row},
           {"kind", std::string(1, timeline::letter(block.kind))},
           {"microbatch", block.microbatch},
           {"label", label_of(block)},
           {"begin", block.begin},
           {"end", block.end}});
      range = std::max(range, block.end);
    }
    expected["figures"].push_back(figure);
  }
  expected["range"] = range;
  return expected;
}

TEST_F(ReportInBrowser, DrawsTheBlocksOfAPipelineWithTheirNumbers) {
  for (const auto order :
       {sample::Order::one_f_one_b, sample::Order::split,
        sample::Order::interleaved}) {
    const auto timeline =
        sample::pipeline_run({.order = order, .slow_stage = 0.2});
    const auto pictures = pipeline_pictures(timeline, "pipeline");
    look(
        "pipeline", sample::with_timeline(timeline),
        pipelines_of(pictures->pictures));
  }
  const auto timeline = sample::placement_run(4, 2);
  const auto pictures = placement_pictures(timeline, "pipeline");
  look(
      "pipeline", sample::with_timeline(timeline),
      pipelines_of(pictures->pictures));
}

TEST_F(ReportInBrowser, PlaysAPipelineStepByStep) {
  for (const auto order : {sample::Order::one_f_one_b, sample::Order::gpipe}) {
    const auto timeline =
        sample::pipeline_run({.order = order, .slow_stage = 0.2});
    const auto pictures = pipeline_pictures(timeline, "pipeline");
    look(
        "player", sample::with_timeline(timeline),
        pipelines_of(pictures->pictures));
  }
}

TEST_F(ReportInBrowser, PlaysASchedulesOwnPage) {
  for (const auto order : {sample::Order::split, sample::Order::interleaved}) {
    const auto picture = sample::schedule_picture({.order = order});
    look_at("player", pipeline_page(picture), pipelines_of({picture}));
    look_at("layout", pipeline_page(picture));
    look_at("quiet", pipeline_page(picture));
  }
}

TEST_F(ReportInBrowser, SaysWhatABlockIsInALargePicture) {
  look_at(
      "hover", pipeline_page(
                   sample::schedule_picture({.ranks = 8, .microbatches = 64})));
}

TEST_F(ReportInBrowser, KeepsPipelinesInThePage) {
  look("layout", sample::with_timeline(sample::pipeline_run({})));
  look("layout", sample::with_timeline(sample::pipeline_run({.replicas = 2})));
  look(
      "layout", sample::with_timeline(
                    sample::pipeline_run({.ranks = 40, .microbatches = 20})));
  look("layout", sample::with_timeline(sample::placement_run(4, 2)));
  look("quiet", sample::with_timeline(sample::pipeline_run({.replicas = 2})));
}

TEST_F(ReportInBrowser, ComparesStrategiesOnOnePage) {
  StrategyPage page{.title = "digits, four ways"};
  for (auto timeline :
       {sample::run({}).timeline, sample::placement_run(4, 2),
        sample::pipeline_run({}),
        sample::pipeline_run({.ranks = 2, .replicas = 2})}) {
    auto run = sample::run({});
    page.runs.push_back(
        {.link = "a/report.html",
         .metrics = run.metrics,
         .evaluations = run.evaluations,
         .timeline = std::move(timeline)});
  }
  look_at("layout", to_html(page));
  look_at("quiet", to_html(page));
}

TEST_F(ReportInBrowser, KeepsTablesInTheirPlace) {
  StrategyPage page{.title = "digits, four ways"};
  for (const auto& name : {"one_device", "data_parallel", "tensor_parallel"}) {
    auto run = sample::run_with_memory({.ranks = 2});
    page.runs.push_back(
        {.name = name,
         .link = "a/report.html",
         .settings = {{"layout.dp", name}, {"model.devices", name}},
         .metrics = run.metrics,
         .evaluations = run.evaluations,
         .timeline = std::move(run.timeline)});
  }
  page.planned.push_back(
      {.model = "runs/demo/gpt",
       .cluster = "h100-sxm:8",
       .layout = "fsdp=4,tp=2 \u00b7 ZeRO 3 \u00b7 8 microbatches of 2"});
  look_at("tables", to_html(page));
  auto pipeline =
      sample::with_prediction(sample::with_timeline(sample::pipeline_run({})));
  for (auto& span : pipeline.timeline.spans) {
    if (span.axis.empty() && span.track == "comm") span.axis = "pp";
  }
  look("tables", pipeline);
  look_at("tables", pipeline_page(sample::schedule_picture({.ranks = 16})));
}

TEST_F(ReportInBrowser, DrawsBarsAndOverlapsOfEachRankWhereTheyWere) {
  for (const int32_t ranks : {1, 3, 20}) {
    const auto input = one_step(ranks);
    look("drawing", input, picture_of(input.timeline, 2));
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
  look("curves", input, Json{{"curves", curves}});

  // 360 stretches; the band of the extremes goes there and back.
  input = sample::run({.steps = 5000});
  curves["loss"] = {360, 720, input.evaluations.size()};
  curves["accuracy"] = {input.evaluations.size()};
  curves["throughput"] = curves["grad-norm"] = {240, 480};
  curves["learning-rate"] = {240};
  look("curves", input, Json{{"curves", curves}});
}

TEST_F(ReportInBrowser, KeepsTextsApartAtEachWidth) {
  auto one_rank = sample::run({.steps = 7, .ranks = 1});
  one_rank.evaluations.clear();
  look("layout", typical());
  look("layout", one_rank);
  look("layout", sample::run({.steps = 9999, .ranks = 16}));
  look("layout", huge());
  look("layout", sample::hostile());
}

TEST_F(ReportInBrowser, DrawsPredictionAndMeasurementOnOneScale) {
  const auto input =
      sample::with_prediction(sample::run_with_memory({.ranks = 4}));
  const timeline::TimedParts real =
      timeline::timed_parts(input.timeline, timeline::diagnose(input.timeline));
  Json expected = {{"predicted", Json::array()}, {"measured", Json::array()}};
  for (const auto& part :
       timeline::compared_parts(input.prediction->parts, real)) {
    expected["predicted"].push_back({part.color, part.predicted});
    expected["measured"].push_back({part.color, part.measured});
  }
  look("prediction", input, expected);
}

TEST_F(ReportInBrowser, KeepsPredictionsInThePage) {
  const auto data_parallel =
      sample::with_prediction(sample::run_with_memory({.ranks = 4}));
  auto pipeline =
      sample::with_prediction(sample::with_timeline(sample::pipeline_run({})));
  look("layout", data_parallel);
  look("colors", data_parallel);
  look("structure", data_parallel);
  look("layout", pipeline);
  pipeline.timeline.simulated = true;
  pipeline.prediction->cluster = std::string(200, 'W');
  look("layout", pipeline);
  look("quiet", pipeline);
  pipeline.prediction =
      StepPrediction{.missing = std::string(300, 'w') + " <b>none</b>"};
  look("layout", pipeline);
}

TEST_F(ReportInBrowser, AsksNothingAndNeedsNoScript) {
  look("quiet", typical());
  look("quiet", sample::hostile());
  look("quiet", sample::tensor_run(sample::uneven_shards(), "self_attn"));
  look("quiet", {.title = "ended before its first step"});
}

TEST_F(ReportInBrowser, DrawsThePartsOfMatricesToScale) {
  const auto model = sample::uneven_shards();
  const auto& layer = model.layers[1].parameters;
  look(
      "shards", sample::tensor_run(model, "self_attn"),
      Json::array(
          {rectangle_of("shards-0-0-b0", model.layers[0].parameters[0], false),
           rectangle_of("shards-1-0-a0", layer[1], true),
           rectangle_of("shards-1-0-a1", layer[2], true),
           rectangle_of("shards-1-0-b0", layer[4], false),
           rectangle_of("shards-1-1-a1", layer[7], true),
           rectangle_of("shards-1-1-b0", layer[8], false)}));
  const auto gpt = sample::gpt_shards({.ranks = 3, .heads = 16});
  look(
      "shards", sample::tensor_run(gpt),
      Json::array(
          {rectangle_of("shards-1-0-a0", gpt.layers[2].parameters[2], true),
           rectangle_of("shards-1-0-b0", gpt.layers[2].parameters[4], false)}));
}

TEST_F(ReportInBrowser, KeepsTextsOfShardedLayersApart) {
  look("layout", sample::tensor_run(sample::uneven_shards(), "self_attn"));
  look(
      "layout", sample::tensor_run(sample::gpt_shards(
                    {.ranks = 8, .hidden = 832, .heads = 13})));
  look("layout", sample::tensor_run(sample::cnn_shards(3)));
}

TEST_F(ReportInBrowser, HasContrastInLightDarkAndPrint) {
  look("colors", typical());
  look("inks", sample::tensor_run(sample::gpt_shards({.ranks = 8})));
}

TEST_F(ReportInBrowser, HasNamesForItsPicturesAndPrints) {
  look("structure", typical());
  look("structure", sample::tensor_run(sample::gpt_shards({})));
  look("structure", sample::with_timeline(sample::pipeline_run({})));
}

TEST(TraceSchema, HoldsForTracesOfRuns) {
  ECHELON_NEED_PYTHON();
  TempFolder folder;
  auto timeline = sample::hostile().timeline;
  timeline.spans.push_back(
      {1, "loader", "decode", timeline::SpanKind::data, -5, 2'000'000'001, -1,
       0});
  timeline::write_chrome_trace(folder.path("a.json"), timeline);
  timeline::write_chrome_trace(folder.path("b.json"), {});
  timeline::write_chrome_trace(folder.path("c.json"), typical().timeline);
  EXPECT_NO_THROW(run_python_script(
      "timeline/trace_schema.py",
      {folder.path("a.json"), folder.path("b.json"), folder.path("c.json")}));
}

}  // namespace echelon::report::report_browser_test
