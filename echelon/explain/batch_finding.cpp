#include <algorithm>

#include "echelon/explain/findings.h"
#include "echelon/job/pipeline_schedule.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::explain {
namespace {

constexpr double kLeastFixed = 0.25;  // of the step
constexpr double kLeastGain = 0.15;   // of a sample's time, simulated

double pass_seconds(const cost::StepParts& parts) {
  return parts.matrix + parts.memory + parts.recompute;
}

// The simulated seconds of a step's passes that do not grow with its samples:
// the difference between twice the step, and a step of twice the batch.
double fixed_seconds_of_passes(const Evidence& evidence) {
  const WhatIf& what_if = evidence.what_if;
  const int64_t batch = evidence.run.job->train.batch;
  const auto twice = what_if.with({"train.batch=" + std::to_string(2 * batch)});
  if (!twice) return 0;
  return std::max(
      0.0, 2 * pass_seconds(what_if.base()->step.parts) -
               pass_seconds(twice->step.parts));
}

// The shares of a step that do not depend on its batch: the optimizer, time of
// which nothing was recorded, and the simulated fixed part of the passes.
struct FixedShares {
  double updating = 0;
  double starting = 0;  // and reading weights
  double all() const { return updating + starting; }
};

FixedShares fixed_shares(const Evidence& evidence) {
  const RankTimes& shares = evidence.shares;
  return {
      shares.optimizer + shares.idle,
      std::min(
          fixed_seconds_of_passes(evidence) / evidence.times.mean.step,
          shares.forward + shares.backward)};
}

// More samples in a pass. With fewer passes the training stays the same.
std::vector<Settings> batch_fixes(const Job& job) {
  std::vector<Settings> all;
  if (job.train.accumulate > 1) {
    for (int64_t count = 1; count < job.train.accumulate; count *= 2) {
      if (job.train.accumulate % count != 0) continue;
      all.push_back({"train.accumulate=" + std::to_string(count)});
    }
    return all;
  }
  for (const int64_t factor : {2, 4, 8}) {
    all.push_back({"train.batch=" + std::to_string(job.train.batch * factor)});
  }
  return all;
}

int64_t samples_of_a_pass(const Job& job) {
  const int64_t passes =
      job.layout.pp > 1 ? microbatches_of(job) : job.train.accumulate;
  return std::max<int64_t>(
      1, job.train.batch / (job.layout.data_ranks() * passes));
}

}  // namespace

std::vector<RunFinding> find_small_batch(const Evidence& evidence) {
  const auto& job = evidence.run.job;
  if (!job || evidence.times.ranks.empty()) return {};
  const FixedShares fixed = fixed_shares(evidence);
  const double share = fixed.all();
  if (share < kLeastFixed) return {};
  const auto best = evidence.what_if.best_of(batch_fixes(*job), kLeastGain);
  if (evidence.what_if.base() && !best) return {};
  RunFinding found{.fault = Fault::small_batch, .share = share};
  const double step = evidence.times.mean.step;
  const int64_t samples = samples_of_a_pass(*job);
  found.reason.diagnosis = format(
      "A rank computes {} {} in a pass, and of each step of {} much is the "
      "same for any batch: updating parameters ({} of the step){}",
      samples, samples == 1 ? "sample" : "samples", format_seconds(step),
      format_percent(fixed.updating),
      fixed.starting >= 0.005 ? format(
                                    ", reading weights and launching operators "
                                    "({}, by the simulator).",
                                    format_percent(fixed.starting))
                              : ".");
  if (!best) {
    found.reason.fix = "Take more samples in a step (train.batch).";
    found.reason.why = "They share the fixed cost of a step.";
    return {found};
  }
  take_simulated_fix(evidence, *best, found);
  const bool batch = best->settings.front().starts_with("train.batch");
  found.reason.fix = batch ? "Take more samples in a step; look at the "
                             "learning rate, it is another training."
                           : "Compute the batch in fewer, larger passes; the "
                             "training stays the same.";
  found.reason.why = format(
      "A simulated sample takes {} as it is and {} then: larger matmuls have a "
      "higher MFU, and more samples share the fixed cost of a step.",
      format_seconds(evidence.what_if.base()->seconds_per_sample),
      format_seconds(best->seconds_per_sample));
  return {found};
}

}  // namespace echelon::explain
