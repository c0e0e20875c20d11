// What a step takes at least, so that slow strategies need no estimate.
#pragma once

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "echelon/planner/candidate.h"
#include "echelon/planner/search_space.h"

namespace echelon {

/// What a step takes at least, whatever is done to save memory: the work of all
/// microbatches shared out evenly over the stages, and the part of the bubble that
/// the schedule cannot avoid where stages differ by less than a tenth. Nothing for
/// optimizer and for communication between data-parallel ranks.
///
///   microbatch_seconds  forward and backward of one microbatch through all layers
double lower_bound_seconds(const Strategy& strategy, double microbatch_seconds);

/// Seconds of a microbatch through all layers on one stage, on the fastest devices.
class MicrobatchTimes {
 public:
  explicit MicrobatchTimes(const SearchJob& job);
  double of(const Strategy& group);

 private:
  using Key = std::tuple<int64_t, int64_t, int64_t, bool, int64_t>;
  double compute(const Strategy& group) const;

  const SearchJob& job_;
  std::vector<Cluster> equals_;  // one for each kind of device
  std::map<Key, double> times_;
};

/// The pipeline's part of a step, which strategies share that differ in what the
/// data-parallel ranks do alone: learned from the first of them.
class PipelineTimes {
 public:
  /// 0 before any was learned.
  double at_least(const Strategy& strategy) const;
  /// `plain`: with nothing done to save memory.
  void learn(const Candidate& plain);

 private:
  struct Key {
    std::array<int64_t, 7> numbers;  // degrees, microbatch, stages
    bool sequence_parallel;
    std::array<Axis, 6> order;
    std::string schedule;
    std::vector<int64_t> stage_layers, rank_microbatch;
    auto operator<=>(const Key&) const = default;
  };
  static Key key_of(const Strategy& strategy);

  std::map<Key, double> seconds_;
};

}  // namespace echelon
