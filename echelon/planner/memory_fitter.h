// The fastest way to make one strategy fit: what is computed again, in as few layers
// as will do, and what lies in the host's memory.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "echelon/planner/candidate.h"
#include "echelon/planner/search_space.h"

namespace echelon {

/// What a job may use of the devices that have most.
double most_usable_bytes(const Cluster& cluster);

class MemoryFitter {
 public:
  /// `offload`: whether the host's memory may be used.
  MemoryFitter(const SearchJob& job, bool offload);

  /// Empty when it does not fit or is not below `limit_seconds`.
  std::optional<Candidate> fit(const Strategy& strategy, double limit_seconds);

  /// Of the last strategy before memory was saved; empty when that was not tried.
  const std::optional<Candidate>& plain() const { return plain_; }
  /// Of all that did not fit, the one that needs the least.
  const std::optional<Candidate>& closest() const { return closest_; }
  int64_t estimated() const { return estimated_; }

 private:
  // What lies beside a strategy's parameters in memory, and where.
  struct Saver {
    bool offload_optimizer = false;
    bool offload_activations = false;
    Recompute recompute = Recompute::none;
  };
  static std::vector<Saver> list_savers(const SearchJob& job, bool offload);

  bool needless(const Saver& saver) const;
  bool partial(Recompute recompute) const;
  bool try_saver(const Strategy& strategy);
  void enter_fewest_layers(Strategy strategy, const Candidate& whole);
  void enter_asked_layers(Strategy strategy);
  int64_t guess_layers(
      const Candidate& none, const Candidate& all, int64_t most) const;
  int64_t layers_of_stage(const Strategy& strategy) const;
  std::optional<Candidate> estimate(const Strategy& strategy);
  void enter(const Candidate& candidate);
  void keep_closest(const Candidate& candidate);

  const SearchJob& job_;
  std::vector<Saver> savers_;
  bool partial_selective_;
  double host_bytes_;  // for each rank
  double usable_bytes_;
  std::vector<Saver> fitted_;
  std::optional<Candidate> best_;
  std::optional<Candidate> closest_;
  std::optional<Candidate> plain_;
  double limit_ = std::numeric_limits<double>::infinity();
  bool too_slow_ = false;
  int64_t estimated_ = 0;
};

}  // namespace echelon
