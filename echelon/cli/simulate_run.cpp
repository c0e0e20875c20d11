#include <filesystem>
#include <numeric>

#include "echelon/cli/new_folder.h"
#include "echelon/cli/simulate_print.h"
#include "echelon/cluster/cluster_file.h"
#include "echelon/cost/counted_model.h"
#include "echelon/predict/counted_layers.h"
#include "echelon/predict/predict_run.h"
#include "echelon/report/report.h"
#include "echelon/text/units.h"
#include "echelon/timeline/chrome_trace.h"
#include "echelon/timeline/metrics.h"

namespace echelon::cli {
namespace {

// A step takes the same whatever it learns: times are all there is.
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
  const auto count = [](int64_t value) {
    return format_count(static_cast<double>(value));
  };
  const auto percent = format_percent(run.step.model_flops_utilisation);
  return {
      {"Simulated", "nothing was trained; times are predictions"},
      {"Model", what.model.name},
      {"Parameters", format_count(what.model.num_parameters())},
      {"Cluster", what.cluster.name},
      {"Strategy", to_string(strategy)},
      {"Ranks",
       count(strategy.layout.num_ranks()) + ", of which some are shown"},
      {"Global batch", count(strategy.global_batch)},
      {"Precision", std::string(to_string(strategy.precision))},
      {"Software", strategy.stack},
      {"Memory",
       format_bytes(static_cast<int64_t>(run.step.memory.peak_bytes())) +
           (run.step.fits ? " of the fullest device, fits"
                          : " of the fullest device: does not fit")},
      {"Utilisation", percent + " of the peak"}};
}

bool is_counted(const ModelShape& model) {
  return !model.layers.empty() && model.layers.front().counted_samples > 0;
}

}  // namespace

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
    metrics.flush();  // so that an error is told
  }
  if (!configuration.text.empty())
    folder.write("config.toml", configuration.text);
  if (is_counted(what.model)) {
    folder.write(kCountedLayersFile, counted_model_json(what.model));
  }
  folder.write("cluster.toml", to_toml(what.cluster));
  write_chrome_trace(folder.path() / "timeline.json", run.timeline);
  write_report(folder.path() / "report.html", input);
  folder.move_into_place();
}

}  // namespace echelon::cli
