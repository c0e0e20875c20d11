// Reduces the gradients of units in one order on all ranks: later units first,
// each one as soon as it and all units before it in that order are complete, so
// that communication overlaps with backward. What is incomplete when a round
// ends is reduced then.
#pragma once

#include <cstddef>
#include <deque>
#include <set>
#include <vector>

#include "echelon/parallel/shard/unsharded_units.h"

namespace echelon::sharding {

/// Not thread-safe. Every rank begins and ends the same rounds.
class UnitReducer {
 public:
  UnitReducer(Units& units, ShardContext& context)
      : units_(units), context_(context) {}

  /// Ends the previous round. `units`: whose gradients will arrive; empty: all.
  /// `reduce` false leaves the gradients unsharded.
  void begin_round(std::vector<size_t> units, bool reduce, bool last);
  /// Adds a gradient that backward computed to the unit's unsharded gradient.
  void
  add(size_t unit, size_t flat, size_t parameter,
      const torch::Tensor& gradient);
  /// Whether all gradients of the unit have arrived in this round.
  bool complete(size_t unit) const;
  /// Ends the round and the step: waits, and sets the gradients of the shards.
  void finish();
  /// Drops all gradients.
  void clear();

  bool last() const { return last_; }

 private:
  void end_round();
  void launch(size_t unit);
  void launch_complete();
  void advance_all();
  void drain();
  void agree_on_used_units();

  Units& units_;
  ShardContext& context_;
  std::vector<size_t> order_;  // of this round's reductions
  size_t position_ = 0;        // in order_: the first that was not launched
  bool open_ = false;
  bool reduce_ = true;
  bool last_ = true;
  std::deque<size_t> in_flight_;
  // Units that no rank used in the last step: reduced at the end of the step.
  std::set<size_t> unused_;
  bool agreed_once_ = false;
  bool agrees_every_step_ = false;
};

}  // namespace echelon::sharding
