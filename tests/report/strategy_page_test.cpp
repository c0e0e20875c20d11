#include "echelon/report/strategy_page.h"

#include <cmath>

#include "echelon/text/text_file.h"
#include "tests/report/page_text.h"
#include "tests/report/sample_pipeline.h"
#include "tests/report/sample_run.h"
#include "tests/support/temp_folder.h"

namespace echelon::report::strategy_page_test {

using sample::contains;
using sample::expect_no_parts;
using sample::expect_parts;

StrategyRun run_of(const timeline::Timeline& timeline, double loss) {
  StrategyRun run{.timeline = timeline};
  run.metrics = {
      {.step = 1,
       .loss = loss,
       .samples_per_second = 2000,
       .step_seconds = 0.0125}};
  run.evaluations = {{.step = 1, .samples = 360, .accuracy = 0.975}};
  return run;
}

TEST(StrategyPage, HasAPictureForEachStrategy) {
  TempFolder folder;
  StrategyPage input{.title = "digits <4 ways>"};
  input.runs = {
      run_of(sample::run({.ranks = 2}).timeline, 0.111),
      run_of(sample::placement_run(3, 3), 0.222),
      run_of(sample::pipeline_run({}), 0.333),
      run_of(sample::pipeline_run({.ranks = 2, .replicas = 2}), 0.444)};
  input.runs[2].link = "../pipe/report.html";
  write_strategy_page(folder.path("page/demo.html"), input);
  const auto page = read_text_file(folder.path("page/demo.html"));
  expect_parts(
      page, {"<h1>digits &lt;4 ways&gt;</h1>", "<h2>Data parallel</h2>",
             "<h2>Model parallel</h2>", "<h2>Pipeline parallel</h2>",
             "<h2>Pipeline and data parallel</h2>", "class=\"lanes\"",
             "id=\"run-1-devices\"", "id=\"run-2-ideal\"", "id=\"run-2-step\"",
             "id=\"run-3-step\"", "<td>0.111</td>", "<td>0.444</td>",
             "<td>97.5 %</td>", "<td>2,000</td><td>12.5 ms</td>",
             "href=\"../pipe/report.html\"",
             ", ../pipe/report.html from where this page was written"});
  EXPECT_LT(page.size(), 500'000u);
}

// Two runs of one strategy are told apart, and fsdp is not data parallel.
TEST(StrategyPage, NamesRunsAndTheirStrategies) {
  const auto timeline = sample::run({.ranks = 2}).timeline;
  StrategyPage page;
  for (const char* name : {"first", "second"}) {
    page.runs.push_back(run_of(timeline, 0.5));
    page.runs.back().name = name;
    page.runs.back().layout = parse_layout("fsdp=2");
    page.runs.back().zero_stage = 2;
  }
  const auto html = to_html(page);
  expect_parts(
      html, {"<a href=\"#strategy-0\">first</a>",
             "<a href=\"#strategy-1\">second</a>", "<h2>second</h2>",
             "<td>Sharded data parallel, fsdp=2</td>",
             "gradients and the optimizer&#39;s state are sharded"});
  expect_no_parts(html, {"whole model", ">Data parallel"});
  const auto title_of = [&](const char* layout) {
    page.runs.resize(1);
    page.runs[0].layout = parse_layout(layout);
    const auto text = to_html(page);
    const auto begin = text.find("<h3>", text.find("strategy-0\"><h2>")) + 4;
    return text.substr(begin, text.find("</h3>", begin) - begin);
  };
  EXPECT_EQ(
      title_of("dp=2,fsdp=2,tp=2,pp=2"),
      "Pipeline, tensor and hybrid sharded data parallel, "
      "dp=2,fsdp=2,pp=2,tp=2");
  EXPECT_EQ(title_of("dp=1"), "One device");
}

StrategyRun with_losses(
    const char* name, const std::vector<std::pair<int64_t, double>>& losses) {
  StrategyRun run{.name = name};
  for (const auto& [step, loss] : losses) {
    run.metrics.push_back({.step = step, .loss = loss});
  }
  return run;
}

TEST(StrategyPage, OverlaysLossesAndSaysHowFarApartTheyAre) {
  StrategyPage page;
  page.runs = {
      with_losses("a", {{1, 2.0}, {2, 1.0}, {3, 0.5}}),
      with_losses("b", {{1, 2.0}, {2, 1.25}, {3, 0.5}, {4, 9.0}}),
      with_losses("c", {{2, NAN}, {3, 0.625}})};
  auto html = to_html(page);
  expect_parts(
      html, {"differ by at most 0.25 (step 2: b is higher than a), over 3 "
             "steps that runs share",
             "stroke c3\"></i>c"});
  EXPECT_EQ(sample::count(html, "class=\"line c"), 3u);
  page.runs = {
      with_losses("a", {{1, 2.0}, {2, 1.0}}),
      with_losses("b", {{1, 2.0}, {2, 1.0}})};
  EXPECT_TRUE(contains(to_html(page), "are equal in all 2 steps"));
  page.runs[1] = with_losses("b", {{3, 2.0}});
  EXPECT_TRUE(contains(to_html(page), "No two runs have a step in common"));
  page.runs.resize(1);
  expect_no_parts(to_html(page), {"differ", "in common"});
  for (auto& step : page.runs[0].metrics) step.simulated = true;
  expect_no_parts(to_html(page), {"<h2>Loss"});
}

TEST(StrategyPage, ListsTheSettingsThatDiffer) {
  StrategyPage page;
  page.runs = {{.name = "a"}, {.name = "b"}, {.name = "bare"}};
  page.runs[0].settings = {
      {"model.name", "\"gpt\""}, {"train.batch", "64"}, {"train.seed", "0"}};
  page.runs[1].settings = {
      {"model.name", "\"gpt\""}, {"train.batch", "32"}, {"comm.new", "true"}};
  const auto html = to_html(page);
  expect_parts(
      html, {"train.batch</th><td>64</td><td>32</td><td>\u2013</td>",
             "train.seed</th><td>0</td><td>\u2013</td>",
             "comm.new</th><td>\u2013</td><td>true</td>"});
  expect_no_parts(html, {"model.name"});
  page.runs[1].settings = page.runs[0].settings;
  EXPECT_TRUE(contains(to_html(page), "Nothing but the runs' folders"));
  page.runs.resize(1);
  expect_no_parts(to_html(page), {"id=\"settings\""});
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

TEST(StrategyPage, OfTextsCountsTokensToo) {
  StrategyRun text;
  text.metrics = {
      {.step = 1, .samples_per_second = 8, .tokens_per_second = 81920}};
  text.evaluations = {{.step = 1, .tokens = 4096, .perplexity = 12.31}};
  StrategyRun images;
  images.metrics = {{.step = 1, .samples_per_second = 2000}};
  const auto both = to_html(StrategyPage{.runs = {text, images}});
  expect_parts(
      both, {">Perplexity</th>", ">Tokens/s</th>",
             "<td>12.3</td><td>8</td><td>81,920</td>",
             "<td>\u2013</td><td>2,000</td><td>\u2013</td>"});
  const auto one = to_html(StrategyPage{.runs = {images}});
  expect_no_parts(one, {"Perplexity", "Tokens/s"});
  expect_no_parts(to_html(StrategyPage{.runs = {text}}), {"Samples/s"});
}

TEST(StrategyPage, LeavesOutWhatARunLacks) {
  const auto timeline = sample::run({.ranks = 1}).timeline;
  const auto page =
      to_html(StrategyPage{.title = "one", .runs = {{.timeline = timeline}}});
  EXPECT_TRUE(contains(page, "<h2>One device</h2>"));
  expect_no_parts(page, {"report of this run", "<script", "<h2>Loss"});
  const auto killed = to_html(StrategyPage{
      .runs = {{.name = "killed", .notes = {"there is no timeline.json"}}}});
  expect_parts(killed, {"Note: there is no timeline.json.", "<h2>killed</h2>"});
  expect_no_parts(killed, {"class=\"finding\"", "class=\"lanes\""});
  EXPECT_FALSE(contains(to_html(StrategyPage{.title = "none"}), "<table"));
}

}  // namespace echelon::report::strategy_page_test
