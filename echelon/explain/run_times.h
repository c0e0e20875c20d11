// What each rank's steps went to, as far as it says what held the run back.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "echelon/layout/layout.h"
#include "echelon/timeline/timeline.h"

namespace echelon {

/// Of one rank in a step, seconds. Without idle time they sum to the step.
struct RankTimes {
  double step = 0;
  double forward = 0;
  double backward = 0;
  double optimizer = 0;
  double data = 0;
  /// Communication that nothing hides, by axis ("dp", "fsdp", "tp", …), from
  /// when every rank of the group had come; of "pp" the messages that were made
  /// already;
  /// "" for the rest.
  std::map<std::string, double> communication;
  double for_ranks = 0;   // waiting in collectives for ranks that came later
  double for_stages = 0;  // waiting for what other pipeline stages compute
  double idle = 0;        // nothing was recorded

  double compute() const { return forward + backward + optimizer; }
};

/// A rank in each of the typical steps.
struct RankHistory {
  int32_t rank = 0;
  int32_t first_stage =
      0;  // of the pipeline; ranks with the same one are peers
  std::vector<RankTimes> steps;
  RankTimes mean;
};

struct RunTimes {
  std::vector<RankHistory> ranks;  // by rank
  std::vector<int64_t>
      steps;       // the typical ones: not over three times the median
  RankTimes mean;  // over ranks
  bool pipeline = false;
};

/// Each number of `times` over its step: shares of it.
RankTimes shares_of(const RankTimes& times);

/// Of `timeline`; no ranks when no step was recorded.
RunTimes
run_times(const Timeline& timeline, const std::optional<Layout>& layout);

}  // namespace echelon
