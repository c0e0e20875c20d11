// The fastest way to make one strategy fit: what is recomputed, in as few
// layers as possible, and what is kept in the host's memory. On equal nodes all
// orders of the axes need the same memory, so a strategy that fits is tried in
// each.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "echelon/planner/pipeline_bound.h"
#include "echelon/planner/search_space.h"

namespace echelon {

/// The bytes that a job may use of the largest device.
double most_usable_bytes(const Cluster& cluster);

class MemoryFitter {
 public:
  /// `offload`: whether the host's memory may be used.
  MemoryFitter(const SearchJob& job, bool offload);

  /// Empty when it does not fit or is not below `limit_seconds`. `bound` is
  /// that of the strategy's group.
  std::optional<Candidate>
  fit(const Strategy& strategy, const PipelineBound& bound,
      double limit_seconds);

  /// The last strategy without savings of memory, if it was timed.
  const std::optional<Candidate>& plain() const { return plain_; }
  /// The one that needs the least memory of all that did not fit.
  std::optional<Candidate> closest() const;
  /// How many steps were timed. Most strategies are found to be too large
  /// first.
  int64_t estimated() const { return estimated_; }

 private:
  // A combination of savings of memory.
  struct Saver {
    bool offload_optimizer = false;
    bool offload_activations = false;
    Recompute recompute = Recompute::none;
  };
  static std::vector<Saver> list_savers(const SearchJob& job, bool offload);

  // A strategy and its memory, before it is timed.
  struct Weighed {
    Strategy strategy;
    MemoryEstimate memory;
    bool fits = false;
  };

  // One way to make it fit.
  struct Way {
    Weighed whole;                  // with recompute in all layers
    std::optional<Weighed> fewest;  // in as few as possible
  };

  std::vector<Way> list_ways(const Strategy& strategy);
  std::optional<Weighed>
  weigh_with(const Saver& saver, Strategy strategy) const;
  bool is_needless(const Saver& saver, const std::vector<Saver>& fitted) const;
  bool partial(Recompute recompute) const;
  bool too_slow(const Strategy& strategy);
  void enter(const Way& way);
  void enter_asked_layers(Strategy strategy);
  std::optional<Weighed> with_fewest_layers(const Weighed& all) const;
  int64_t
  guess_layers(const Weighed& none, const Weighed& all, int64_t most) const;
  int64_t layers_of_stage(const Strategy& strategy) const;
  std::optional<Weighed> weigh(const Strategy& strategy) const;
  Candidate time(const Weighed& weighed);
  void enter(const Candidate& candidate);
  void enter_in_orders(const Candidate& candidate);
  double least_seconds(const Candidate& candidate) const;
  bool closer(const Weighed& weighed) const;

  const SearchJob& job_;
  const PipelineBound* bound_ = nullptr;  // while one strategy is fitted
  std::vector<Saver> savers_;
  bool partial_selective_;
  double host_bytes_;  // for each rank
  double usable_bytes_;
  std::vector<AxisOrder> other_orders_;  // that may be faster
  std::optional<Candidate> best_;
  std::optional<Weighed> closest_;
  std::optional<Weighed> unsaved_;  // the strategy without savings
  std::optional<Candidate> plain_;
  double limit_ = std::numeric_limits<double>::infinity();
  int64_t estimated_ = 0;
};

}  // namespace echelon
