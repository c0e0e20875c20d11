#include "echelon/explain/explain.h"

#include <algorithm>
#include <iterator>
#include <map>

#include "echelon/explain/findings.h"
#include "echelon/predict/predict_run.h"
#include "echelon/text/units.h"

namespace echelon {
namespace {

std::vector<RunFinding> all_findings(const Evidence& evidence) {
  std::vector<RunFinding> all;
  for (const auto find :
       {find_data_loading, find_exposed_communication, find_pipeline_waits,
        find_uneven_ranks, find_memory, find_small_batch}) {
    auto some = find(evidence);
    all.insert(
        all.end(), std::make_move_iterator(some.begin()),
        std::make_move_iterator(some.end()));
  }
  std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) {
    return a.share > b.share;
  });
  return all;
}

bool is_any_simulated(const std::vector<RunFinding>& findings) {
  return std::any_of(findings.begin(), findings.end(), [](const auto& found) {
    return found.gain_source == GainSource::simulated;
  });
}

double median_step(const std::vector<StepMetrics>& steps) {
  std::vector<double> seconds;
  for (const auto& step : steps) seconds.push_back(step.step_seconds);
  std::sort(seconds.begin(), seconds.end());
  return seconds.empty() ? 0 : seconds[seconds.size() / 2];
}

// Metrics name the rank with most work in each step, not how much more it has.
void note_slowest_rank(const RunRecord& run, std::vector<std::string>& notes) {
  std::map<int32_t, size_t> counts;
  size_t steps = 0;
  for (const auto& step : run.steps) {
    if (!step.slowest_rank) continue;
    ++counts[*step.slowest_rank];
    ++steps;
  }
  for (const auto& [rank, count] : counts) {
    if (steps < 8 || count * 5 < steps * 4) continue;
    notes.push_back(
        "rank " + std::to_string(rank) + " had most work in " +
        std::to_string(count) + " of " + std::to_string(steps) +
        " steps; by how much, a timeline would say");
  }
}

void fill_from_timeline(
    const RunRecord& run, const RunTimes& times, RunExplanation& made) {
  made.recorded_steps = static_cast<int64_t>(times.steps.size());
  made.step_seconds = times.mean.step;
  made.ranks = static_cast<int64_t>(times.ranks.size());
  const RankTimes shares = shares_of(times.mean);
  made.compute_share = shares.compute();
  if (shares.idle >= 2 * kLeastShare) {
    made.notes.push_back(
        "of " + format_percent(shares.idle) +
        " of the step nothing was recorded (work of the host, another "
        "program)");
  }
}

void compare_with_prediction(
    const RunRecord& run, const WhatIf& what_if, RunExplanation& made) {
  const StepPrediction predicted =
      predict_step(what_if.base()->configured, what_if.cluster());
  made.predicted_seconds = predicted.step_seconds;
  made.counted_layers = run.layers.has_value();
  const double ratio = made.step_seconds / made.predicted_seconds;
  if (is_any_simulated(made.findings) && (ratio > 1.5 || ratio < 1 / 1.5)) {
    made.notes.push_back(
        "the simulator is far from this run (" +
        format_seconds(made.predicted_seconds) +
        " a step): take its gains as rough");
  }
  if (made.recorded_steps == 0) return;
  made.parts = compared_parts(
      predicted.parts, timed_parts(run.timeline, diagnose(run.timeline)));
}

}  // namespace

RunExplanation
explain_run(const std::filesystem::path& run, const ExplainOptions& options) {
  const RunRecord record = read_run(run);
  std::optional<Layout> layout;
  if (record.job) layout = record.job->layout;
  const RunTimes times = run_times(record.timeline, layout);
  const RankTimes shares = shares_of(times.mean);
  const WhatIf what_if(record, options.cluster, options.simulation_seconds);
  RunExplanation made;
  made.title = record.title;
  made.notes = record.notes;
  made.simulated = record.simulated;
  if (layout) {
    made.layout = to_string(*layout);
    made.ranks = layout->num_ranks();
  }
  if (times.ranks.empty()) {
    made.step_seconds = median_step(record.steps);
    note_slowest_rank(record, made.notes);
  } else {
    fill_from_timeline(record, times, made);
  }
  made.findings = all_findings({record, times, shares, what_if});
  if (const int64_t some = what_if.num_left_out(); some > 0) {
    made.notes.push_back(
        std::to_string(some) + (some == 1 ? " setting was" : " settings were") +
        " not simulated, which would have taken longer than " +
        format_seconds(options.simulation_seconds) +
        "; `echelon plan` searches");
  }
  if (what_if.base()) {
    made.cluster = what_if.cluster().name;
    if (!what_if.is_guessed()) compare_with_prediction(record, what_if, made);
    if (what_if.is_guessed() && is_any_simulated(made.findings)) {
      made.notes.push_back(
          "fixes are simulated with rates that are guesses for this machine; "
          "`echelon "
          "bench --save -n " +
          std::to_string(layout->num_ranks()) + "` measures them");
    }
  } else if (record.job) {
    made.notes.push_back("no fix is simulated: " + what_if.why());
  }
  return made;
}

}  // namespace echelon
