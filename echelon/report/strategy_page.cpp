#include "echelon/report/strategy_page.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <utility>

#include "echelon/report/page.h"
#include "echelon/report/pipeline_page.h"
#include "echelon/report/sections.h"
#include "echelon/text/text_file.h"
#include "echelon/text/units.h"
#include "echelon/timeline/chrome_trace.h"
#include "echelon/timeline/overlap.h"

namespace echelon::report {
namespace {

struct Strategy {
  const char* title;
  const char* paragraph;  // how it works
};

constexpr Strategy kPipeline = {
    "Pipeline parallel",
    "The model is partitioned into stages, one or more on each device, and the "
    "batch is split into microbatches. They follow one another through the "
    "stages, so that the devices work side by side; the gradients come back "
    "the same way."};
constexpr Strategy kPipelineReplicas = {
    "Pipeline and data parallel",
    "Several replicas of a pipeline share the batch: in each, microbatches "
    "follow one another through the stages; then the replicas of a stage "
    "average their gradients."};
constexpr Strategy kPipelineTensor = {
    "Pipeline and tensor parallel",
    "The model is partitioned into stages, and the matrices of each layer are "
    "sharded over the ranks that hold its stage. Microbatches follow one "
    "another through the stages; in each, these ranks put their parts of a "
    "layer together."};
constexpr Strategy kPipelineTensorData = {
    "Pipeline, tensor and data parallel",
    "Several copies of the model share the batch. Each is partitioned into "
    "stages, and the matrices of each layer are sharded over the ranks that "
    "hold its stage; at the end of a step the copies average their gradients."};
constexpr Strategy kTensor = {
    "Tensor parallel",
    "The matrices of each layer are sharded over the ranks, which compute the "
    "whole batch together: each has some of a layer's features, and where a "
    "layer needs them all the parts are summed."};
constexpr Strategy kTensorData = {
    "Tensor and data parallel",
    "Groups of ranks share the batch. In a group the matrices of each layer "
    "are sharded over the ranks, which compute their samples together; then "
    "the ranks with the same parts average their gradients."};
constexpr Strategy kPlacement = {
    "Model parallel",
    "The layers are spread over several devices of one process. A batch passes "
    "the devices one after another, and its gradients come back the same way: "
    "each device holds a part of the model only."};
constexpr Strategy kData = {
    "Data parallel",
    "Each rank holds the whole model and computes a share of the batch. The "
    "gradients are averaged over the ranks, bucket by bucket, while the "
    "backward still computes the next ones."};
constexpr Strategy kOneDevice = {
    "One device",
    "One device computes the whole batch: what the others equal."};

// A run, and what is computed of it before it is drawn.
struct Run {
  const StrategyRun& input;
  timeline::Diagnosis diagnosis = {};
  std::optional<StagePictures> stages = {};
  Strategy strategy = {};
};

bool has_replicas(const StagePictures& stages) {
  return std::ranges::any_of(stages.pictures.back().rows, [](const auto& row) {
    return row.group > 0;
  });
}

bool talks_along(const timeline::Timeline& timeline, const std::string& axis) {
  return std::ranges::find(timeline.spans, axis, &timeline::Span::axis) !=
         timeline.spans.end();
}

Strategy strategy_of(const Run& run) {
  const auto& timeline = run.input.timeline;
  const bool tensor = talks_along(timeline, "tp");
  const bool data = talks_along(timeline, "dp_replicate");
  if (!run.stages) {
    if (tensor) return data ? kTensorData : kTensor;
    return timeline.rank_names.size() > 1 ? kData : kOneDevice;
  }
  if (!timeline::typical_pipeline_step(timeline)) return kPlacement;
  if (tensor) return data ? kPipelineTensorData : kPipelineTensor;
  return has_replicas(*run.stages) ? kPipelineReplicas : kPipeline;
}

Run run_of(const StrategyRun& input, size_t number) {
  Run run{input};
  run.diagnosis = timeline::diagnose(input.timeline);
  run.stages = stage_pictures(input.timeline, format("run-{}", number));
  run.strategy = strategy_of(run);
  return run;
}

// The share of a typical step in which nothing is computed.
std::string loss_text(const Run& run) {
  if (run.stages) return format_percent(run.stages->idle) + " idle";
  const auto& mean = run.diagnosis.mean;
  if (!(mean.step_seconds > 0)) return "\u2013";
  return format_percent(1 - mean.compute_seconds / mean.step_seconds) +
         " not computing";
}

bool counts_tokens(const Run& run) {
  const auto& metrics = run.input.metrics;
  return !metrics.empty() && metrics[0].tokens_per_second;
}

void draw_cells(Markup& page, const Run& run, bool tokens) {
  const auto& metrics = run.input.metrics;
  const auto& evaluations = run.input.evaluations;
  const auto cell = [&](bool known, const auto& text) {
    page.add("<td>{}</td>", known ? text() : "\u2013");
  };
  const auto rate_cell = [&](const auto& of_step) {
    const auto rate = timeline::median_of(metrics, of_step);
    cell(rate.has_value(), [&] { return format_count(*rate); });
  };
  cell(!metrics.empty(), [&] {
    return format_number(timeline::final_loss(metrics));
  });
  cell(!evaluations.empty(), [&] {
    return format_percent(evaluations.back().accuracy);
  });
  if (tokens) {
    cell(!evaluations.empty() && evaluations.back().perplexity, [&] {
      return format_number(*evaluations.back().perplexity);
    });
  }
  rate_cell(
      [](const timeline::StepMetrics& m) { return m.samples_per_second; });
  if (tokens) {
    rate_cell([](const timeline::StepMetrics& m) {
      return m.tokens_per_second.value_or(NAN);
    });
  }
  page.add("<td>{}</td>", loss_text(run));
}

void draw_table(Markup& page, const std::vector<Run>& runs) {
  const bool tokens = std::ranges::any_of(runs, counts_tokens);
  std::vector<std::string> heads = {
      "Strategy", "Final loss", "Held-out accuracy"};
  if (tokens) heads.push_back("Perplexity");
  heads.push_back("Samples/s, median");
  if (tokens) heads.push_back("Tokens/s, median");
  heads.push_back("Of a step");
  open_table(page, "The runs in figures", heads);
  for (size_t i = 0; i < runs.size(); ++i) {
    page.add(
        "<tr><th scope='row'><a href='#strategy-{}'>{}</a></th>", i,
        runs[i].strategy.title);
    draw_cells(page, runs[i], tokens);
    page.add("</tr>");
  }
  close_table(page);
}

void draw_run(Markup& page, const Run& run, size_t number) {
  const auto id = format("strategy-{}", number);
  page.add(
      "<section id='{}'><h2>{}</h2><p class='lead'>{}</p>", id,
      run.strategy.title, run.strategy.paragraph);
  if (run.stages) {
    page.add("<p class='finding'>{}</p>", unbroken(run.stages->sentence));
    draw_stage_pictures(page, *run.stages);
  } else {
    page.add("<p class='finding'>{}</p>", unbroken(run.diagnosis.sentence));
    draw_typical_step(page, run.input.timeline, run.diagnosis, id + "-");
  }
  if (!run.input.link.empty()) {
    page.add(
        "<p class='note'><a href='{}'>{}</a></p>", run.input.link,
        "The run's own report");
  }
  page.add("</section>");
}

}  // namespace

std::string to_html(const StrategyPage& input) {
  std::vector<Run> runs;
  for (const auto& run : input.runs) runs.push_back(run_of(run, runs.size()));
  const bool plays = std::ranges::any_of(
      runs, [](const Run& run) { return run.stages.has_value(); });
  Markup page;
  page.add("<header>");
  draw_title(page, "strategies compared", input.title);
  page.add("</header>");
  if (!runs.empty()) draw_table(page, runs);
  for (size_t i = 0; i < runs.size(); ++i) draw_run(page, runs[i], i);
  page.add(
      "<footer>Written by Echelon from the timeline.json and metrics.jsonl of "
      "each run.</footer>");
  return page_of(
      input.title, std::move(page),
      plays ? PageScript::player : PageScript::none);
}

StrategyRun read_strategy_run(
    const std::filesystem::path& run_folder,
    const std::filesystem::path& page_folder) {
  StrategyRun run;
  run.timeline = timeline::read_chrome_trace(run_folder / "timeline.json");
  if (std::filesystem::exists(run_folder / "metrics.jsonl")) {
    auto metrics = timeline::read_metrics(run_folder / "metrics.jsonl");
    run.metrics = std::move(metrics.steps);
    run.evaluations = std::move(metrics.evaluations);
  }
  const auto report = run_folder / "report.html";
  if (std::filesystem::exists(report)) {
    run.link = std::filesystem::proximate(report, page_folder).generic_string();
  }
  return run;
}

void write_strategy_page(
    const std::filesystem::path& path, const std::string& title,
    const std::vector<std::filesystem::path>& run_folders) {
  StrategyPage page{.title = title};
  const auto folder = std::filesystem::absolute(path).parent_path();
  for (const auto& run : run_folders) {
    page.runs.push_back(
        read_strategy_run(std::filesystem::absolute(run), folder));
  }
  write_file_atomically(path, to_html(page));
}

}  // namespace echelon::report
