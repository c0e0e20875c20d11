#include "echelon/simulator/simulate.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "echelon/error.h"
#include "echelon/simulator/simulated_job.h"
#include "echelon/simulator/simulated_timeline.h"
#include "echelon/simulator/traffic_axes.h"

namespace echelon {
namespace simulator {
namespace {

std::string text(double value) {
  char buffer[32];
  std::snprintf(buffer, sizeof(buffer), "%g", value);
  return buffer;
}

void check(const SimulationOptions& options) {
  const auto refuse = [](const std::string& what) { throw ConfigError(what); };
  if (options.steps < 1) {
    refuse("steps = " + std::to_string(options.steps) + ": at least 1");
  }
  if (!(options.jitter >= 0 && options.jitter < 1)) {
    refuse(
        "jitter = " + text(options.jitter) +
        ": a share of an operation's time, from 0 to below 1; 0.05 is 5 %");
  }
  if (options.stragglers < 0) {
    refuse(
        "stragglers = " + std::to_string(options.stragglers) + ": at least 0");
  }
  if (!(options.straggler_factor > 0 &&
        std::isfinite(options.straggler_factor))) {
    refuse(
        "straggler factor = " + text(options.straggler_factor) +
        ": above 0; 1.2 takes a fifth longer");
  }
}

size_t slowest(const SimulatedJob& job, const StepRun& run) {
  size_t last = 0;
  for (size_t c = 0; c < run.ranks.size(); ++c) {
    if (length_of(job, run.ranks[c]) > length_of(job, run.ranks[last]))
      last = c;
  }
  return last;
}

// What the rank that the step is long for did with it.
void fill_parts(
    const ModelJob& job, const Layout& layout, const StepRun& run,
    StepEstimate& step) {
  const RankStep& rank = run.ranks[slowest(job.job, run)];
  const auto work = [&](Work kind) {
    return rank.work[static_cast<size_t>(kind)];
  };
  StepParts parts;
  parts.matrix = work(Work::matrix);
  parts.memory = work(Work::memory);
  parts.recompute = work(Work::recompute);
  parts.optimizer = work(Work::optimizer);
  parts.other = work(Work::other);
  // Until its first action it was in the step before.
  parts.bubble =
      rank.pipeline - (job.job.validates_afterwards ? rank.begin : 0);
  step.communication = {};
  const auto& axes = job.job.classes.axes;
  for (size_t i = 0; i < axes.size(); ++i) {
    const auto axis = static_cast<size_t>(reported_axis(axes[i], layout));
    parts.exposed[axis] += rank.exposed[i];
    step.communication[axis] += rank.communication[i];
  }
  const auto pipeline = static_cast<size_t>(Axis::pp);
  parts.exposed[pipeline] += rank.sending;
  step.communication[pipeline] += rank.communication.back();
  step.parts = parts;
}

void scale_rates(StepEstimate& step, double seconds) {
  const double factor = step.step_seconds / seconds;
  step.step_seconds = seconds;
  step.tokens_per_second *= factor;
  step.model_flops_utilisation *= factor;
  step.full_attention_utilisation *= factor;
}

// The number of the step of median length.
size_t typical(const std::vector<double>& seconds) {
  std::vector<size_t> order(seconds.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto middle = order.begin() + static_cast<ptrdiff_t>(order.size() / 2);
  std::nth_element(order.begin(), middle, order.end(), [&](size_t a, size_t b) {
    return seconds[a] < seconds[b];
  });
  return *middle;
}

// Of a machine whose ranks are uneven: the number of one of median length.
int64_t usual_step(const SimulatedJob& job) {
  constexpr int64_t kDraws = 41;
  constexpr int64_t kMostPrograms = 4096;  // that are run for it
  const int64_t draws =
      std::min(kMostPrograms / static_cast<int64_t>(job.ranks.size()), kDraws);
  if (draws < 2) return 0;
  std::vector<double> seconds;
  for (int64_t step = 0; step < draws; ++step) {
    seconds.push_back(run_step(job, step).seconds);
  }
  return static_cast<int64_t>(typical(seconds));
}

}  // namespace
}  // namespace simulator

SimulatedRun simulate(
    const ModelShape& model, const Strategy& strategy, const Cluster& cluster,
    const SimulationOptions& options) {
  using namespace simulator;
  check(options);
  SimulatedRun result;
  result.step = estimate_step(model, strategy, cluster);
  const ModelJob job = make_job(model, strategy, cluster, options);
  result.simulated_ranks = static_cast<int64_t>(job.job.ranks.size());
  SpanCollector spans(
      job, strategy.layout, ranks_to_show(job, options.timeline_ranks));
  std::vector<StepEstimate> steps;  // what each was spent on
  StepRun run;
  const bool uneven = job.job.uneven();
  const int64_t first = uneven && options.steps == 1 ? usual_step(job.job) : 0;
  double begin = 0;
  for (int64_t step = 0; step < options.steps; ++step) {
    // If all steps are alike, a further one is run to be seen alone.
    const bool seen =
        options.timeline_ranks > 0 && step < options.timeline_steps;
    if (step == 0 || uneven || options.jitter > 0 || seen) {
      spans.begin_step(step, begin);
      run = run_step(job.job, first + step, seen ? &spans : nullptr);
      result.events += run.events;
    }
    steps.push_back(result.step);
    fill_parts(job, strategy.layout, run, steps.back());
    result.step_seconds.push_back(run.seconds);
    begin += run.seconds;
  }
  const size_t middle = typical(result.step_seconds);
  result.step = std::move(steps[middle]);
  scale_rates(result.step, result.step_seconds[middle]);
  if (options.timeline_ranks > 0) {
    result.timeline =
        spans.take(model.name + " on " + cluster.name + ", simulated", cluster);
  }
  return result;
}

}  // namespace echelon
