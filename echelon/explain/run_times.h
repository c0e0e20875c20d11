// How each rank's steps spend their time: computing, communicating, or waiting
// for data, other ranks or other stages.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "echelon/layout/layout.h"
#include "echelon/timeline/intervals.h"
#include "echelon/timeline/timeline.h"

namespace echelon {

/// Seconds of one rank in a step. Without idle time they sum to the step.
struct RankTimes {
  double step = 0;
  double forward = 0;
  double backward = 0;
  double optimizer = 0;
  double data = 0;
  /// Exposed communication by axis ("dp", "fsdp", "tp", …), from when every
  /// rank of the group had come. For "pp", messages that were already computed;
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
  int32_t first_stage = 0;  // of the pipeline; the same for peers
  std::vector<RankTimes> steps;
  RankTimes mean;
};

struct RunTimes {
  std::vector<RankHistory> ranks;  // by rank
  std::vector<int64_t> steps;  // typical ones: at most three times the median
  RankTimes mean;              // over ranks
  bool pipeline = false;
};

/// Each number of `times` as a share of its step.
RankTimes shares_of(const RankTimes& times);

using RankStep = std::pair<int32_t, int64_t>;  // rank, step

/// How long ranks wait in collectives for those that come late.
struct LateRanks {
  /// From when a rank came to a collective until the last one of its group did.
  std::map<RankStep, Intervals> waits;
  /// For each last rank, the time in which some rank waited for it.
  std::map<RankStep, Intervals> caused;
};

/// Matches the calls of one collective by axis, name and order in the step. The
/// layout says which ranks form a group. Without one, all ranks do if the
/// step's collectives are along one axis; otherwise nothing is known. Messages
/// between pipeline stages are left out.
LateRanks
late_ranks(const Timeline& timeline, const std::optional<Layout>& layout);

/// The times of `timeline`, without ranks when no step was recorded.
RunTimes
run_times(const Timeline& timeline, const std::optional<Layout>& layout);

}  // namespace echelon
