// Reduces units' gradients in one order on all ranks: the later ones first,
// each when it and all before it are complete, so that communication runs
// beside backward. What is not complete when a round ends is reduced then.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <set>
#include <vector>

#include "echelon/parallel/shard/gathered_units.h"

namespace echelon::sharding {

/// Not thread-safe. Every rank begins and ends the same rounds.
class UnitReducer {
 public:
  UnitReducer(Units& units, Surroundings& surroundings)
      : units_(units), around_(surroundings) {}

  /// Ends the round before it. `units`: those whose gradients will come; empty:
  /// all. `reduce`: false leaves gradients whole.
  void begin_round(std::vector<size_t> units, bool reduce, bool last);
  /// What backward computed, to be added to the unit's whole gradient.
  void
  add(size_t unit, size_t flat, size_t parameter,
      const torch::Tensor& gradient);
  /// All gradients of the unit came in this round.
  bool complete(size_t unit) const;
  /// Ends the round and the step, waits; sets the shards' gradients.
  void finish();
  /// Gradients are dropped.
  void clear();

  bool last() const { return last_; }

 private:
  void end_round();
  void launch(size_t unit);
  void launch_complete();
  void advance_all();
  void drain();
  void ask_who_used();

  Units& units_;
  Surroundings& around_;
  std::vector<size_t> order_;  // of this round
  size_t position_ = 0;        // the first of them that was not launched
  bool open_ = false;
  bool reduce_ = true;
  bool last_ = true;
  std::deque<size_t> in_flight_;
  // Units that no rank used in the last step are left to its end.
  std::set<size_t> unused_;
  bool asked_ = false;
  bool asks_always_ = false;
};

}  // namespace echelon::sharding
