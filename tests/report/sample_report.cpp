// Writes reports of made-up runs, to look at the page without training:
//   build/tests/sample_report FOLDER
#include <filesystem>
#include <iostream>

#include "echelon/report/pipeline_page.h"
#include "echelon/report/strategy_page.h"
#include "echelon/text/text_file.h"
#include "echelon/timeline/chrome_trace.h"
#include "tests/report/sample_pipeline.h"
#include "tests/report/sample_run.h"
#include "tests/report/sample_tensor.h"

using namespace echelon;

namespace {

void write(
    const std::filesystem::path& folder, const report::ReportInput& input) {
  write_report(folder / "report.html", input);
  timeline::write_chrome_trace(folder / "timeline.json", input.timeline);
  std::cout << (folder / "report.html").string() << "\n";
}

void write_schedule(
    const std::filesystem::path& folder,
    const report::sample::PipelineShape& shape) {
  write_file_atomically(
      folder / "report.html",
      pipeline_page(report::sample::schedule_picture(shape)));
  std::cout << (folder / "report.html").string() << "\n";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: sample_report FOLDER\n";
    return 2;
  }
  const std::filesystem::path folder = argv[1];
  using namespace report::sample;
  write(folder / "memory", run_with_memory({.ranks = 2}));
  write(folder / "prediction", with_prediction(run_with_memory({.ranks = 4})));
  auto pipelined =
      with_prediction(with_timeline(pipeline_run({.slow_stage = 0.15})));
  write(folder / "prediction-pipeline", pipelined);
  pipelined.timeline.simulated = true;
  write(folder / "prediction-alone", pipelined);
  auto unknown = run({.ranks = 2});
  unknown.prediction = report::StepPrediction{
      .missing =
          "The rates of this processor are not known, so that nothing is "
          "predicted. "
          "`echelon bench --save -n 2` measures them once for runs of 2 "
          "ranks."};
  write(folder / "prediction-missing", unknown);
  write(folder / "typical", run({.slow_rank = 0.12}));
  write(folder / "one-rank", run({.ranks = 1}));
  write(
      folder / "huge",
      run({.steps = 100'000, .ranks = 64, .buckets = 40, .layers = 60}));
  write(folder / "sixteen", run({.ranks = 16, .slow_rank = 0.3}));
  write(folder / "hostile", hostile());
  write_schedule(folder / "schedule", {});
  write_schedule(folder / "split", {.order = Order::split});
  write_schedule(folder / "interleaved", {.order = Order::interleaved});
  write_schedule(folder / "wide", {.ranks = 64, .microbatches = 256});
  write(folder / "pipeline", with_timeline(pipeline_run({.slow_stage = 0.15})));
  write(
      folder / "replicas",
      with_timeline(pipeline_run({.ranks = 2, .replicas = 2})));
  write(
      folder / "pipeline-64",
      with_timeline(pipeline_run({.ranks = 64, .microbatches = 64})));
  write(folder / "placement", with_timeline(placement_run(4, 3)));
  report::StrategyPage strategies{.title = "simple_cnn on digits, four ways"};
  const auto add = [&](const char* name, const char* layout,
                       const timeline::Timeline& timeline) {
    auto made = run({});
    strategies.runs.push_back(
        {.name = name,
         .link = "../" + std::string(name) + "/report.html",
         .layout = parse_layout(layout),
         .metrics = made.metrics,
         .evaluations = made.evaluations,
         .timeline = timeline});
  };
  add("typical", "fsdp=4", run({.slow_rank = 0.12}).timeline);
  add("placement", "dp=1", placement_run(4, 3));
  add("pipeline", "pp=4", pipeline_run({.slow_stage = 0.15}));
  add("replicas", "dp=2,pp=2", pipeline_run({.ranks = 2, .replicas = 2}));
  write_strategy_page(folder / "strategies" / "report.html", strategies);
  write(folder / "tensor", tensor_run(gpt_shards({})));
  write(folder / "tensor-llama", tensor_run(uneven_shards(), "self_attn"));
  write(
      folder / "tensor-8",
      tensor_run(gpt_shards({.ranks = 8, .hidden = 832, .heads = 13})));
  write(folder / "tensor-cnn", tensor_run(cnn_shards(3)));
  write(folder / "empty", {.title = "a run that ended before its first step"});
}
