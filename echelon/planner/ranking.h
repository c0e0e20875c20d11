// The fastest candidates that a search has found so far.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "echelon/cost/step_estimate.h"
#include "echelon/cost/strategy.h"
#include "echelon/layout/layout.h"

namespace echelon::planner {

struct Candidate {
  cost::Strategy strategy;
  cost::StepEstimate step;
};

/// Compares the time of a step, then the memory.
bool is_faster(const Candidate& one, const Candidate& other);

/// Keeps the fastest candidate of each layout (degrees, dp and fsdp taken
/// together), for the `keep` fastest layouts.
class Ranking {
 public:
  explicit Ranking(int64_t keep) : keep_(static_cast<size_t>(keep)) {}

  /// A candidate enters only if its step is shorter than this.
  double limit_seconds(const Layout& layout) const;
  void enter(const Candidate& candidate);
  /// Sorted, the fastest first.
  std::vector<Candidate> sorted() const;

 private:
  using Key = std::array<int64_t, 5>;
  static Key key_of(const Layout& layout);
  void find_slowest();

  size_t keep_;
  std::map<Key, Candidate> best_;
  std::map<Key, Candidate>::iterator slowest_;
};

}  // namespace echelon::planner
