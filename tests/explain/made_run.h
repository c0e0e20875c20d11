// Runs that were never trained: their timelines from given times, so that each
// has one fault, or none.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "echelon/job/job.h"
#include "echelon/schedule/timing.h"
#include "echelon/timeline/timeline.h"

namespace echelon::explain::made {

/// Milliseconds of a rank in one step.
struct RankStep {
  double data = 0.5;
  double forward = 30;
  double backward = 60;  // computing; the wait for gradients comes on top
  double optimizer = 4;
};

struct DataParallel {
  int ranks = 2;
  int64_t steps = 10;
  std::function<RankStep(int rank, int64_t step)> times = [](int, int64_t) {
    return RankStep{};
  };
  int buckets = 4;        // of gradients, that leave evenly during backward
  double transfer = 1.5;  // milliseconds of each, from when all ranks have come
  int64_t bytes = 8 << 20;
  std::string axis = "dp_replicate";
};

/// Ranks that sum gradients during backward, and wait for the last of them.
timeline::Timeline timeline_of(const DataParallel& run);

/// A pipeline's steps: the schedule's passes with these costs in seconds.
timeline::Timeline timeline_of(
    const Schedule& schedule, const std::vector<StageCost>& costs,
    int64_t steps);

/// Gives each rank `bytes` of activations in the middle of the first step.
void add_memory(
    timeline::Timeline& timeline, int64_t bytes, int64_t limit_bytes);

/// digits, simple_cnn, a batch of 64: of as many ranks as the layout says.
Job job_of(const std::string& layout);

/// FOLDER/timeline.json, metrics.jsonl and config.toml; returns the folder. A
/// timeline without spans is not written.
std::string write_run(
    const std::string& folder, const Job& job,
    const timeline::Timeline& timeline);

}  // namespace echelon::explain::made
