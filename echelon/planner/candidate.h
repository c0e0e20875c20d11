// A strategy with its estimate, and the best of many.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "echelon/cost/step_estimate.h"

namespace echelon {

struct Candidate {
  Strategy strategy;
  StepEstimate step;
};

/// By the time of a step, then by memory.
bool faster(const Candidate& one, const Candidate& other);

/// The fastest of each layout (degrees, dp and fsdp taken together), of the
/// `keep` fastest layouts.
class Ranking {
 public:
  explicit Ranking(int64_t keep) : keep_(static_cast<size_t>(keep)) {}

  /// What is not below cannot enter.
  double limit_seconds(const Layout& layout) const;
  void enter(const Candidate& candidate);
  /// The fastest first.
  std::vector<Candidate> sorted() const;

 private:
  using Key = std::array<int64_t, 5>;
  static Key key_of(const Layout& layout);
  void find_slowest();

  size_t keep_;
  std::map<Key, Candidate> best_;
  std::map<Key, Candidate>::iterator slowest_;
};

}  // namespace echelon
