// What steps that were timed tell of others, so that slow ones need not be.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "echelon/planner/candidate.h"

namespace echelon {

/// The pipeline's part of a step, which strategies share that differ in what
/// the data-parallel ranks do alone: learned from the first of them.
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
    AxisOrder order;
    std::string schedule;
    std::vector<int64_t> stage_layers, rank_microbatch;
    auto operator<=>(const Key&) const = default;
  };
  static Key key_of(const Strategy& strategy);

  std::map<Key, double> seconds_;
};

}  // namespace echelon
