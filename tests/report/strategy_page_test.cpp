#include "echelon/report/strategy_page.h"

#include <gmock/gmock.h>

#include "echelon/error.h"
#include "echelon/text/text_file.h"
#include "echelon/timeline/chrome_trace.h"
#include "tests/report/page_text.h"
#include "tests/report/sample_pipeline.h"
#include "tests/report/sample_run.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::report::strategy_page_test {

using sample::contains;
using sample::expect_no_parts;
using sample::expect_parts;
using testing::HasSubstr;

// A run's folder as `echelon train` leaves it, as far as the page reads it.
void write_run(
    const std::string& folder, const timeline::Timeline& timeline,
    double loss) {
  timeline::write_chrome_trace(folder + "/timeline.json", timeline);
  timeline::MetricsWriter metrics(folder + "/metrics.jsonl");
  metrics.append(timeline::StepMetrics{
      .step = 1, .loss = loss, .samples_per_second = 2000});
  metrics.append(timeline::EvaluationMetrics{
      .step = 1, .samples = 360, .accuracy = 0.975});
  write_file_atomically(folder + "/report.html", "<html>");
}

TEST(StrategyPage, HasAPictureForEachStrategy) {
  TempFolder folder;
  write_run(folder.path("data"), sample::run({.ranks = 2}).timeline, 0.111);
  write_run(folder.path("model"), sample::placement_run(3, 3), 0.222);
  write_run(folder.path("pipe"), sample::pipeline_run({}), 0.333);
  write_run(
      folder.path("both"), sample::pipeline_run({.ranks = 2, .replicas = 2}),
      0.444);
  write_strategy_page(
      folder.path("page/demo.html"), "digits <4 ways>",
      {folder.path("data"), folder.path("model"), folder.path("pipe"),
       folder.path("both")});
  const auto page = read_text_file(folder.path("page/demo.html"));
  expect_parts(
      page,
      {"<h1>digits &lt;4 ways&gt;</h1>", "<h2>Data parallel</h2>",
       "<h2>Model parallel</h2>", "<h2>Pipeline parallel</h2>",
       "<h2>Pipeline and data parallel</h2>", "class=\"lanes\"",
       "id=\"run-1-devices\"", "id=\"run-2-ideal\"", "id=\"run-2-step\"",
       "id=\"run-3-step\"", "<td>0.111</td>", "<td>0.444</td>",
       "<td>97.5 %</td>", "<td>2,000</td>", "href=\"../pipe/report.html\""});
  EXPECT_LT(page.size(), 500'000u);
}

// Which axes the ranks talked along says what the strategy was.
TEST(StrategyPage, TellsTensorParallelFromDataParallel) {
  TempFolder folder;
  const auto title_of = [&](timeline::Timeline timeline, const char* axis,
                            const char* other) {
    for (auto& span : timeline.spans) {
      if (span.kind == timeline::SpanKind::communication) span.axis = axis;
    }
    if (*other != 0) {
      timeline::Span span = timeline.spans.front();
      span.track = "comm";
      span.kind = timeline::SpanKind::communication;
      span.axis = other;
      timeline.spans.push_back(span);
    }
    const StrategyPage page{.title = "one", .runs = {{.timeline = timeline}}};
    const auto html = to_html(page);
    const auto begin = html.find("<h2>") + 4;
    return html.substr(begin, html.find("</h2>") - begin);
  };
  const auto flat = sample::run({.ranks = 2}).timeline;
  EXPECT_EQ(title_of(flat, "dp_replicate", ""), "Data parallel");
  EXPECT_EQ(title_of(flat, "tp", ""), "Tensor parallel");
  EXPECT_EQ(title_of(flat, "tp", "dp_replicate"), "Tensor and data parallel");
  const auto pipes = sample::pipeline_run({.ranks = 2, .replicas = 2});
  EXPECT_EQ(
      title_of(pipes, "pp", "dp_replicate"), "Pipeline and data parallel");
  EXPECT_EQ(title_of(pipes, "pp", "tp"), "Pipeline and tensor parallel");
  EXPECT_EQ(
      title_of(pipes, "dp_replicate", "tp"),
      "Pipeline, tensor and data parallel");
}

TEST(StrategyPage, SaysWhichRunHasNoTimeline) {
  TempFolder folder;
  const auto run = folder.path("missing");
  EXPECT_THAT(
      error_text([&] {
        write_strategy_page(folder.path("demo.html"), "demo", {run});
      }),
      HasSubstr(run + "/timeline.json"));
  EXPECT_THROW(
      write_strategy_page(folder.path("demo.html"), "demo", {run}), DataError);
}

TEST(StrategyPage, OfTextsCountsTokensToo) {
  StrategyRun text;
  text.metrics = {
      {.step = 1, .samples_per_second = 8, .tokens_per_second = 81920}};
  text.evaluations = {{.step = 1, .tokens = 4096, .perplexity = 12.31}};
  StrategyRun images;
  images.metrics = {{.step = 1, .samples_per_second = 2000}};
  const auto both = to_html(StrategyPage{.runs = {text, images}});
  expect_parts(
      both, {">Perplexity</th>", ">Tokens/s, median</th>",
             "<td>12.3</td><td>8</td><td>81,920</td>",
             "<td>\u2013</td><td>2,000</td><td>\u2013</td>"});
  const auto one = to_html(StrategyPage{.runs = {images}});
  expect_no_parts(one, {"Perplexity", "Tokens/s"});
}

TEST(StrategyPage, LeavesOutWhatARunLacks) {
  TempFolder folder;
  timeline::write_chrome_trace(
      folder.path("run/timeline.json"), sample::run({.ranks = 1}).timeline);
  const auto run = read_strategy_run(folder.path("run"), folder.path("."));
  EXPECT_TRUE(run.metrics.empty());
  EXPECT_EQ(run.link, "");
  const auto page = to_html(StrategyPage{.title = "one", .runs = {run}});
  EXPECT_TRUE(contains(page, "<h2>One device</h2>"));
  expect_no_parts(page, {"own report", "<script"});
  EXPECT_FALSE(contains(to_html(StrategyPage{.title = "none"}), "<table"));
}

}  // namespace echelon::report::strategy_page_test
