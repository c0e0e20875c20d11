#include "echelon/report/strategy_page.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <utility>

#include "echelon/report/lanes.h"
#include "echelon/report/page.h"
#include "echelon/report/pipeline_section.h"
#include "echelon/report/report_time.h"
#include "echelon/text/text_file.h"
#include "echelon/text/units.h"
#include "echelon/timeline/chrome_trace.h"
#include "echelon/timeline/overlap.h"

namespace echelon {
namespace {

struct Text {
  const char* title;
  const char* paragraph;
};

constexpr Text kPipeline = {
    "Pipeline parallel",
    "The model is cut into stages, one or more on each device, and the batch "
    "into microbatches. They follow one another through the stages, so that "
    "the devices work side by side; the gradients come back the same way."};
constexpr Text kPipelineReplicas = {
    "Pipeline and data parallel",
    "Several replicas of a pipeline share the batch: in each, microbatches "
    "follow one another through the stages; then the replicas of a stage "
    "average their gradients."};
constexpr Text kPipelineTensor = {
    "Pipeline and tensor parallel",
    "The model is cut into stages, and the matrices of each layer over the "
    "ranks that hold its stage. Microbatches follow one another through the "
    "stages; in each, these ranks put their parts of a layer together."};
constexpr Text kPipelineTensorData = {
    "Pipeline, tensor and data parallel",
    "Several copies of the model share the batch. Each is cut into stages, and "
    "the matrices of each layer over the ranks that hold its stage; at the end "
    "of a step the copies average their gradients."};
constexpr Text kTensor = {
    "Tensor parallel",
    "The matrices of each layer are cut over the ranks, which compute the "
    "whole "
    "batch together: each has some of a layer's features, and where a layer "
    "needs them all the parts are summed."};
constexpr Text kTensorData = {
    "Tensor and data parallel",
    "Groups of ranks share the batch. In a group the matrices of each layer "
    "are "
    "cut over the ranks, which compute their samples together; then the ranks "
    "with the same parts average their gradients."};
constexpr Text kPlacement = {
    "Model parallel",
    "The layers are spread over several devices of one process. A batch passes "
    "the devices one after another, and its gradients come back the same way: "
    "each device holds a part of the model only."};
constexpr Text kData = {
    "Data parallel",
    "Each rank holds the whole model and computes a share of the batch. The "
    "gradients are averaged over the ranks, bucket by bucket, while the "
    "backward still computes the next ones."};
constexpr Text kOneDevice = {
    "One device",
    "One device computes the whole batch: what the others equal."};

// What a page needs to know of a run before it draws.
struct Run {
  StrategyRun input;
  Diagnosis diagnosis;
  std::optional<StagePictures> stages;
};

bool has_replicas(const StagePictures& stages) {
  const auto& rows = stages.pictures.back().rows;
  return std::any_of(
      rows.begin(), rows.end(), [](const auto& row) { return row.group > 0; });
}

bool talks_along(const Timeline& timeline, const std::string& axis) {
  return std::any_of(
      timeline.spans.begin(), timeline.spans.end(),
      [&](const Span& span) { return span.axis == axis; });
}

Text text_of(const Run& run) {
  const auto& timeline = run.input.timeline;
  const bool tensor = talks_along(timeline, "tp");
  const bool data = talks_along(timeline, "dp_replicate");
  if (!run.stages) {
    if (tensor) return data ? kTensorData : kTensor;
    return timeline.rank_names.size() > 1 ? kData : kOneDevice;
  }
  if (!typical_pipeline_step(timeline)) return kPlacement;
  if (tensor) return data ? kPipelineTensorData : kPipelineTensor;
  return has_replicas(*run.stages) ? kPipelineReplicas : kPipeline;
}

Run run_of(const StrategyRun& input, size_t number) {
  Run run{input};
  run.diagnosis = diagnose(input.timeline);
  run.stages = stage_pictures(
      input.timeline, input.ideal_pipeline, "run-" + std::to_string(number));
  const Text text = text_of(run);
  if (input.title.empty()) run.input.title = text.title;
  if (input.paragraph.empty()) run.input.paragraph = text.paragraph;
  return run;
}

double median_rate(
    const std::vector<StepMetrics>& metrics,
    const std::function<double(const StepMetrics&)>& rate) {
  std::vector<double> rates;
  for (const auto& m : metrics) {
    if (std::isfinite(rate(m))) rates.push_back(rate(m));
  }
  if (rates.empty()) return NAN;
  const auto middle = rates.begin() + rates.size() / 2;
  std::nth_element(rates.begin(), middle, rates.end());
  return *middle;
}

// Where a typical step's time goes that is not computation.
std::string loss_text(const Run& run) {
  if (run.stages) return format_percent(run.stages->idle) + " idle";
  const auto& mean = run.diagnosis.mean;
  if (!(mean.step_seconds > 0)) return "\u2013";
  return format_percent(1 - mean.compute_seconds / mean.step_seconds) +
         " not computing";
}

double tokens_per_second(const StepMetrics& metrics) {
  return metrics.tokens_per_second.value_or(NAN);
}

// Whether any of the runs is of texts: then the table tells of tokens too.
bool any_texts(const std::vector<Run>& runs) {
  return std::any_of(runs.begin(), runs.end(), [](const Run& run) {
    const auto& metrics = run.input.metrics;
    return !metrics.empty() && metrics[0].tokens_per_second;
  });
}

void draw_cells(Markup& page, const Run& run, bool texts) {
  const auto& metrics = run.input.metrics;
  const auto& evaluations = run.input.evaluations;
  const std::string none = "\u2013";
  const auto rate_text = [&](const auto& of_step) {
    const double rate = median_rate(metrics, of_step);
    return std::isnan(rate) ? none : format_count(rate);
  };
  page.leaf(
      "td", {}, metrics.empty() ? none : format_number(metrics.back().loss));
  page.leaf(
      "td", {},
      evaluations.empty() ? none : format_percent(evaluations.back().accuracy));
  if (texts) {
    page.leaf(
        "td", {},
        evaluations.empty() || !evaluations.back().perplexity
            ? none
            : format_number(*evaluations.back().perplexity));
  }
  page.leaf("td", {}, rate_text(&StepMetrics::samples_per_second));
  if (texts) page.leaf("td", {}, rate_text(tokens_per_second));
  page.leaf("td", {}, loss_text(run));
}

void draw_table(Markup& page, const std::vector<Run>& runs) {
  page.open(
      "div", {{"class", "scroll"},
              {"tabindex", "0"},
              {"role", "region"},
              {"aria-label", "The runs in figures"}});
  page.open("table").leaf("caption", {{"class", "hidden"}}, "The runs");
  page.open("thead").open("tr");
  const bool texts = any_texts(runs);
  std::vector<std::string> heads = {
      "Strategy", "Final loss", "Held-out accuracy"};
  if (texts) heads.push_back("Perplexity");
  heads.push_back("Samples/s, median");
  if (texts) heads.push_back("Tokens/s, median");
  heads.push_back("Of a step");
  for (const auto& head : heads) {
    page.leaf("th", {{"scope", "col"}}, head);
  }
  page.close().close().open("tbody");
  for (size_t i = 0; i < runs.size(); ++i) {
    page.open("tr").open("th", {{"scope", "row"}});
    page.leaf(
        "a", {{"href", "#strategy-" + std::to_string(i)}}, runs[i].input.title);
    page.close();
    draw_cells(page, runs[i], texts);
    page.close();
  }
  page.close().close().close();
}

void draw_run(Markup& page, const Run& run, size_t number) {
  const auto id = "strategy-" + std::to_string(number);
  page.open("section", {{"id", id}}).leaf("h2", {}, run.input.title);
  page.leaf("p", {{"class", "lead"}}, run.input.paragraph);
  if (run.stages) {
    page.leaf("p", {{"class", "finding"}}, unbroken(run.stages->sentence));
    draw_stage_pictures(page, *run.stages);
  } else {
    page.leaf("p", {{"class", "finding"}}, unbroken(run.diagnosis.sentence));
    draw_typical_step(page, run.input.timeline, run.diagnosis, id + "-");
  }
  if (!run.input.link.empty()) {
    page.open("p", {{"class", "note"}});
    page.leaf("a", {{"href", run.input.link}}, "The run's own report");
    page.close();
  }
  page.close();
}

}  // namespace

std::string to_html(const StrategyPage& input) {
  std::vector<Run> runs;
  for (const auto& run : input.runs) runs.push_back(run_of(run, runs.size()));
  const bool plays = std::any_of(runs.begin(), runs.end(), [](const Run& run) {
    return run.stages.has_value();
  });
  const PageScript script = plays ? PageScript::player : PageScript::none;
  Markup page;
  open_page(page, input.title, script);
  draw_lanes_pattern(page);
  page.open("header");
  page.leaf("p", {{"class", "eyebrow"}}, "Echelon \u00b7 strategies compared");
  page.leaf("h1", {}, input.title);
  if (!input.lead.empty()) {
    page.leaf("p", {{"class", "lead under"}}, input.lead);
  }
  page.close();
  if (!runs.empty()) draw_table(page, runs);
  for (size_t i = 0; i < runs.size(); ++i) draw_run(page, runs[i], i);
  page.leaf(
      "footer", {},
      "Written by Echelon from the timeline.json and metrics.jsonl of each "
      "run.");
  return finish_page(std::move(page), script);
}

StrategyRun read_strategy_run(
    const std::filesystem::path& run_folder,
    const std::filesystem::path& page_folder) {
  StrategyRun run;
  run.timeline = read_chrome_trace(run_folder / "timeline.json");
  if (std::filesystem::exists(run_folder / "metrics.jsonl")) {
    auto metrics = read_metrics(run_folder / "metrics.jsonl");
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
  write_text_file(path, to_html(page));
}

}  // namespace echelon
