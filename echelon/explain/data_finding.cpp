#include <algorithm>
#include <cmath>

#include "echelon/explain/findings.h"
#include "echelon/options/data.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::explain {
namespace {

struct DataWait {
  double share = 0;  // of the step
  double step_seconds = 0;
  std::vector<int> ranks;  // that wait longest; empty: all alike, or not known
};

// Ranks synchronise in each step, which is as late as the rank that waited
// longest.
DataWait wait_in_timeline(const RunTimes& times) {
  DataWait wait;
  double most = 0;
  for (const RankHistory& rank : times.ranks) {
    most = std::max(most, rank.mean.data);
  }
  for (const RankHistory& rank : times.ranks) {
    if (rank.mean.data >= 0.5 * most) wait.ranks.push_back(rank.rank);
  }
  if (wait.ranks.size() == times.ranks.size()) wait.ranks.clear();
  wait.step_seconds = times.mean.step;
  if (wait.step_seconds > 0) wait.share = most / wait.step_seconds;
  return wait;
}

DataWait wait_in_metrics(const std::vector<timeline::StepMetrics>& steps) {
  DataWait wait;
  double data = 0;
  // The first step waits for the first batch.
  for (size_t i = steps.size() > 1 ? 1 : 0; i < steps.size(); ++i) {
    wait.step_seconds += steps[i].step_seconds;
    data += steps[i].data_seconds;
  }
  if (wait.step_seconds > 0) wait.share = data / wait.step_seconds;
  wait.step_seconds /=
      std::max<double>(1, static_cast<double>(steps.size()) - 1);
  return wait;
}

std::string waiting_ranks(const std::vector<int>& ranks) {
  if (ranks.empty()) return "The ranks wait";
  if (ranks.size() == 1) return format("Rank {} waits", ranks.front());
  return format("{} of the ranks wait", ranks.size());
}

// Batches are prepared faster in proportion to the workers, while computation
// takes the same time.
double gain_of_workers(double share, double factor) {
  return 1 - std::max(1 - share, 1 / factor);
}

}  // namespace

std::vector<RunFinding> find_data_loading(const Evidence& evidence) {
  const bool spans = !evidence.times.ranks.empty();
  const DataWait wait = spans ? wait_in_timeline(evidence.times)
                              : wait_in_metrics(evidence.run.steps);
  if (wait.share < kLeastWait) return {};
  // More threads would not shorten such a wait.
  if (wait.share * wait.step_seconds < kQuickBatchSeconds) return {};
  RunFinding found{
      .fault = Fault::data_loading, .share = wait.share, .ranks = wait.ranks};
  found.reason.diagnosis = format(
      "{} {} of each step of {} for the next batch: it is prepared more slowly "
      "than it is used.",
      waiting_ranks(wait.ranks), format_seconds(wait.share * wait.step_seconds),
      format_seconds(wait.step_seconds));
  if (!evidence.run.job) {
    found.reason.fix =
        "Prepare batches with more threads, or with less work each.";
    found.reason.why =
        "Batches are prepared while the rank computes, which then hides the "
        "rest of the wait.";
    return {found};
  }
  const DataOptions& data = evidence.run.job->data;
  // As many workers as would keep up, at least twice as many as now.
  const auto factor = std::clamp<int64_t>(
      std::llround(std::ceil(1 / std::max(1 - wait.share, 0.01))), 2, 8);
  const int64_t workers = std::min<int64_t>(256, data.workers * factor);
  found.settings = {format("data.workers={}", workers)};
  if (data.prefetch < workers) {
    found.settings.push_back(format("data.prefetch={}", workers));
  }
  found.gain = gain_of_workers(
      wait.share,
      static_cast<double>(workers) / static_cast<double>(data.workers));
  found.gain_source = GainSource::measured;
  found.reason.fix = format(
      "Prepare batches in {} threads a rank, not {}, where the host has the "
      "cores; else do less work for each sample.",
      workers, data.workers);
  found.reason.why = format(
      "A batch takes the loader {}, and the step needs one every {}. Threads "
      "prepare batches in parallel, while the rank computes.",
      format_seconds(wait.step_seconds),
      format_seconds((1 - wait.share) * wait.step_seconds));
  return {found};
}

}  // namespace echelon::explain
