#include <algorithm>
#include <cmath>

#include "echelon/explain/findings.h"
#include "echelon/options/data.h"
#include "echelon/text/units.h"

namespace echelon {
namespace {

struct DataWait {
  double share = 0;  // of the step
  double step_seconds = 0;
  std::vector<int> ranks;  // who waits longest; empty: all alike, or not known
};

// Ranks meet in each step: it is as late as the one that waited longest.
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

DataWait wait_in_metrics(const std::vector<StepMetrics>& steps) {
  DataWait wait;
  double data = 0;
  // The first step waits for the first batch of all.
  for (size_t i = steps.size() > 1 ? 1 : 0; i < steps.size(); ++i) {
    wait.step_seconds += steps[i].step_seconds;
    data += steps[i].data_seconds;
  }
  if (wait.step_seconds > 0) wait.share = data / wait.step_seconds;
  wait.step_seconds /=
      std::max<double>(1, static_cast<double>(steps.size()) - 1);
  return wait;
}

std::string ranks_text(const std::vector<int>& ranks) {
  if (ranks.empty()) return "The ranks wait";
  if (ranks.size() == 1) {
    return "Rank " + std::to_string(ranks.front()) + " waits";
  }
  return std::to_string(ranks.size()) + " of the ranks wait";
}

// Batches come as fast as before, times the workers; computing goes on beside
// it.
double gain_of_workers(double share, double factor) {
  return 1 - std::max(1 - share, 1 / factor);
}

}  // namespace

std::vector<RunFinding> find_data_loading(const Evidence& evidence) {
  const bool spans = !evidence.times.ranks.empty();
  const DataWait wait = spans ? wait_in_timeline(evidence.times)
                              : wait_in_metrics(evidence.run.steps);
  if (wait.share < kLeastWait) return {};
  // More threads would not shorten it.
  if (wait.share * wait.step_seconds < kQuickBatchSeconds) return {};
  RunFinding found;
  found.fault = Fault::data_loading;
  found.share = wait.share;
  found.ranks = wait.ranks;
  const std::string seconds = format_seconds(wait.share * wait.step_seconds);
  found.reason.diagnosis =
      ranks_text(wait.ranks) + " " + seconds + " of each step of " +
      format_seconds(wait.step_seconds) +
      " for the next batch: it is prepared more slowly than it is used.";
  if (!evidence.run.job) {
    found.reason.fix =
        "Prepare batches with more threads, or with less work each.";
    found.reason.why =
        "Batches are prepared beside computation; what is left of the "
        "wait then hides behind it.";
    return {found};
  }
  const DataOptions& data = evidence.run.job->data;
  // As many as would keep up, at least twice.
  const auto factor = std::clamp<int64_t>(
      std::llround(std::ceil(1 / std::max(1 - wait.share, 0.01))), 2, 8);
  const int64_t workers = std::min<int64_t>(256, data.workers * factor);
  found.settings = {"data.workers=" + std::to_string(workers)};
  if (data.prefetch < workers) {
    found.settings.push_back("data.prefetch=" + std::to_string(workers));
  }
  found.gain = gain_of_workers(
      wait.share,
      static_cast<double>(workers) / static_cast<double>(data.workers));
  found.gain_source = GainSource::measured;
  found.reason.fix =
      "Prepare batches in " + std::to_string(workers) +
      " threads a rank, not " + std::to_string(data.workers) +
      ", where the host has the cores; else less work for each sample.";
  found.reason.why =
      "A batch takes the loader " + format_seconds(wait.step_seconds) +
      ", and the step needs one every " +
      format_seconds((1 - wait.share) * wait.step_seconds) +
      ". Threads prepare batches side by side, beside computation.";
  return {found};
}

}  // namespace echelon
