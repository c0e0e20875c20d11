#include <algorithm>
#include <filesystem>
#include <numeric>
#include <utility>

#include "echelon/cli/new_folder.h"
#include "echelon/cli/simulate.h"
#include "echelon/cli/terminal.h"
#include "echelon/cluster/cluster_file.h"
#include "echelon/cost/counted_model.h"
#include "echelon/planner/configuration.h"
#include "echelon/predict/configured.h"
#include "echelon/predict/counted_layers.h"
#include "echelon/predict/predict_run.h"
#include "echelon/report/report.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"
#include "echelon/timeline/chrome_trace.h"
#include "echelon/timeline/metrics.h"

namespace echelon::cli {
namespace {

std::string set(const char* key, int64_t value) {
  return format("{}={}", key, value);
}

std::string set(const char* key, const std::string& value) {
  return format("{}=\"{}\"", key, value);
}

// The batch, and the number of microbatches that it is split into.
void set_passes(const Strategy& strategy, std::vector<std::string>& settings) {
  settings.push_back(set("train.batch", strategy.global_batch));
  settings.push_back(
      set(strategy.layout.pp > 1 ? "layout.microbatches" : "train.accumulate",
          strategy.num_microbatches()));
}

// The settings of the flags that were given.
std::vector<std::string>
settings_of(const SimulateArguments& arguments, const Strategy& strategy) {
  std::vector<std::string> settings;
  if (!arguments.batch.empty() || !arguments.microbatch.empty()) {
    set_passes(strategy, settings);
  }
  if (!arguments.seq_len.empty()) {
    settings.push_back(set("data.sequence", strategy.seq_len));
  }
  if (!arguments.schedule.empty()) {
    settings.push_back(set("layout.schedule", strategy.schedule));
  }
  if (!arguments.stages_per_rank.empty()) {
    settings.push_back(set("layout.stages_per_rank", strategy.stages_per_rank));
  }
  if (!arguments.recompute.empty()) {
    settings.push_back(set("memory.recompute", to_string(strategy.recompute)));
  }
  if (!arguments.zero.empty()) {
    settings.push_back(set("shard.stage", strategy.zero_stage));
  }
  if (strategy.precision == Precision::bf16 ||
      strategy.precision == Precision::fp16) {
    settings.push_back(
        set("precision.compute", std::string(to_string(strategy.precision))));
  }
  if (arguments.sequence_parallel) {
    settings.push_back("layout.sequence_parallel=true");
  }
  return settings;
}

Job planned_job(const SimulateCase& what) {
  const Strategy& strategy = what.strategy;
  const PlanRequest request{
      .model = what.model,
      .cluster = what.cluster,
      .global_batch = strategy.global_batch,
      .seq_len = strategy.seq_len,
      .precision = strategy.precision,
      .stack = strategy.stack};
  const Plan plan{.strategy = strategy};
  Job job = parse_job(to_configuration(plan, request), "what was simulated");
  job.optimizer.name = strategy.optimizer;
  job.train.steps = what.options.steps;
  if (job.data.name != "images") return job;
  job.data.name = "dummy";
  job.data.shape = {3, job.data.image_size, job.data.image_size};
  job.data.classes = what.model.layers.back().columns;
  job.data.holdout = 0;
  job.data.samples = std::max(job.data.samples, 2 * strategy.global_batch);
  return job;
}

// The flags that a configuration cannot express.
std::string missing_settings(const Strategy& strategy, const Job& job) {
  std::vector<std::string> flags;
  if (strategy.stack != "echelon") flags.push_back("--stack " + strategy.stack);
  if (configured_strategy(job).precision != strategy.precision) {
    flags.push_back(format("--precision {}", to_string(strategy.precision)));
  }
  if (flags.empty()) return "";
  return "config.toml does not say " + joined(flags) +
         ", which echelon train does not have";
}

// Nothing is trained, so the metrics are times alone.
std::vector<StepMetrics>
metrics_of(const SimulateCase& what, const SimulatedRun& run) {
  std::vector<StepMetrics> list;
  const double samples = static_cast<double>(what.strategy.global_batch);
  const int64_t tokens =
      what.strategy.seq_len > 0 ? what.strategy.seq_len : what.model.seq_len;
  for (const double seconds : run.step_seconds) {
    StepMetrics step;
    step.simulated = true;
    step.step = static_cast<int64_t>(list.size()) + 1;
    step.step_seconds = seconds;
    step.samples_per_second = samples / seconds;
    if (what.model.transformer) {
      step.tokens_per_second = samples * static_cast<double>(tokens) / seconds;
    }
    list.push_back(step);
  }
  return list;
}

std::vector<std::pair<std::string, std::string>>
facts_of(const SimulateCase& what, const SimulatedRun& run) {
  const Strategy& strategy = what.strategy;
  return {
      {"Simulated", "nothing was trained; times are predictions"},
      {"Model", what.model.name},
      {"Parameters", format_count(what.model.num_parameters())},
      {"Cluster", what.cluster.name},
      {"Strategy", to_string(strategy)},
      {"Ranks", format_count(strategy.layout.num_ranks()) + "; some are shown"},
      {"Global batch", format_count(strategy.global_batch)},
      {"Precision", std::string(to_string(strategy.precision))},
      {"Software", strategy.stack},
      {"Memory", format_bytes(run.step.memory.peak_bytes()) +
                     (run.step.fits ? " of the fullest device, fits"
                                    : " of the fullest device: does not fit")},
      {"MFU", format_percent(run.step.model_flops_utilisation)}};
}

bool is_counted(const ModelShape& model) {
  return !model.layers.empty() && model.layers.front().counted_samples > 0;
}

}  // namespace

SimulatedConfiguration
configuration_of(const SimulateArguments& arguments, const SimulateCase& what) {
  if (arguments.config.empty() && !is_trained_here(what.model)) {
    return {
        .missing =
            "there is no config.toml: echelon train has no " + what.model.name};
  }
  const Job job =
      arguments.config.empty()
          ? planned_job(what)
          : load_job(
                arguments.config, {.set = settings_of(arguments, what.strategy),
                                   .layout = arguments.layout});
  return {to_toml(job), missing_settings(what.strategy, job)};
}

void write_simulated_run(
    const SimulateCase& what, const SimulateResult& result,
    const SimulatedConfiguration& configuration, const std::string& path) {
  const SimulatedRun& run = result.run;
  NewFolder folder(path);
  ReportInput input;
  input.title = what.model.name + " on " + what.cluster.name + ", simulated";
  input.facts = facts_of(what, run);
  input.metrics = metrics_of(what, run);
  input.timeline = run.timeline;
  input.prediction = prediction_of(run, what.strategy, what.cluster);
  input.total_seconds =
      std::accumulate(run.step_seconds.begin(), run.step_seconds.end(), 0.0);
  {
    MetricsWriter metrics(folder.path() / "metrics.jsonl");
    for (const auto& step : input.metrics) metrics.append(step);
    metrics.flush();  // reports errors
  }
  if (!configuration.text.empty()) {
    folder.write("config.toml", configuration.text);
  }
  if (is_counted(what.model)) {
    folder.write(kCountedLayersFile, counted_model_json(what.model));
  }
  folder.write("cluster.toml", to_toml(what.cluster));
  write_chrome_trace(folder.path() / "timeline.json", run.timeline);
  write_report(folder.path() / "report.html", input);
  folder.move_into_place();
}

}  // namespace echelon::cli
