// Writes reports of made-up runs, to look at the page without training:
//   build/tests/sample_report FOLDER
#include <filesystem>
#include <iostream>
#include <limits>

#include "echelon/report/pipeline_page.h"
#include "echelon/report/strategy_page.h"
#include "echelon/text/text_file.h"
#include "echelon/timeline/chrome_trace.h"
#include "tests/report/sample_pipeline.h"
#include "tests/report/sample_run.h"
#include "tests/report/sample_tensor.h"

namespace {

void write(
    const std::filesystem::path& folder, const echelon::ReportInput& input) {
  echelon::write_report(folder / "report.html", input);
  echelon::write_chrome_trace(folder / "timeline.json", input.timeline);
  std::cout << (folder / "report.html").string() << "\n";
}

void write_schedule(
    const std::filesystem::path& folder,
    const echelon::sample::PipelineShape& shape) {
  const auto order = echelon::sample::pipeline_order(shape);
  echelon::PipelinePicture picture;
  picture.id = "schedule";
  picture.title = "A schedule";
  picture.rows = order.rows;
  picture.blocks = *echelon::ideal_blocks(order);
  picture.unit = "forwards";
  echelon::write_file_atomically(
      folder / "report.html", echelon::pipeline_page(picture));
  std::cout << (folder / "report.html").string() << "\n";
}

echelon::ReportInput with_timeline(echelon::Timeline timeline) {
  auto input = echelon::sample::run({});
  input.timeline = std::move(timeline);
  return input;
}

// Texts and figures that a page must survive.
echelon::ReportInput hostile() {
  auto input = echelon::sample::run({.steps = 40, .ranks = 2});
  const std::string text =
      "<script>document.title='run'</script>\"' onload=x &amp; \x01\xff "
      "</title></style><b>";
  input.title = text + std::string(300, 'w');
  input.facts.push_back({text, text + std::string(400, 'x')});
  input.outcome = "stopped: " + text;
  input.timeline.rank_names[0] = text;
  for (auto& span : input.timeline.spans) span.name += text;
  input.metrics[20].loss = std::numeric_limits<double>::quiet_NaN();
  input.metrics[21].loss = std::numeric_limits<double>::infinity();
  input.metrics[22].samples_per_second = 1e300;
  return input;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: sample_report FOLDER\n";
    return 2;
  }
  const std::filesystem::path folder = argv[1];
  using echelon::sample::run;
  write(folder / "memory", echelon::sample::run_with_memory({.ranks = 2}));
  using echelon::sample::prediction_of;
  auto predicted = echelon::sample::run_with_memory({.ranks = 4});
  predicted.prediction = prediction_of(predicted.timeline);
  write(folder / "prediction", predicted);
  auto pipelined =
      with_timeline(echelon::sample::pipeline_run({.slow_stage = 0.15}));
  pipelined.prediction = prediction_of(pipelined.timeline);
  write(folder / "prediction-pipeline", pipelined);
  pipelined.timeline.simulated = true;
  write(folder / "prediction-alone", pipelined);
  auto unknown = run({.ranks = 2});
  unknown.prediction = echelon::StepPrediction{
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
  using echelon::sample::Order;
  write_schedule(folder / "schedule", {});
  write_schedule(folder / "split", {.order = Order::split});
  write_schedule(folder / "interleaved", {.order = Order::interleaved});
  write_schedule(folder / "wide", {.ranks = 64, .microbatches = 256});
  using echelon::sample::pipeline_run;
  write(folder / "pipeline", with_timeline(pipeline_run({.slow_stage = 0.15})));
  write(
      folder / "replicas",
      with_timeline(pipeline_run({.ranks = 2, .replicas = 2})));
  write(
      folder / "pipeline-64",
      with_timeline(pipeline_run({.ranks = 64, .microbatches = 64})));
  write(
      folder / "placement",
      with_timeline(echelon::sample::placement_run(4, 3)));
  echelon::write_strategy_page(
      folder / "strategies" / "report.html", "simple_cnn on digits, four ways",
      {folder / "typical", folder / "placement", folder / "pipeline",
       folder / "replicas"});
  using echelon::sample::tensor_run;
  write(folder / "tensor", tensor_run(echelon::sample::gpt_cut({})));
  write(
      folder / "tensor-llama", tensor_run(
                                   echelon::sample::llama_cut(
                                       {.ranks = 4,
                                        .layers = 16,
                                        .hidden = 1920,
                                        .heads = 30,
                                        .kv_heads = 2,
                                        .intermediate = 5632,
                                        .words = 32001,
                                        .cuts_tokens = true,
                                        .tokens = 4098}),
                                   "self_attn"));
  write(
      folder / "tensor-8", tensor_run(echelon::sample::gpt_cut(
                               {.ranks = 8, .hidden = 832, .heads = 13})));
  write(folder / "tensor-cnn", tensor_run(echelon::sample::cnn_cut(3)));
  write(folder / "empty", {.title = "a run that ended before its first step"});
}
