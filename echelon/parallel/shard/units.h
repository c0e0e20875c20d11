// Units of parameters: which of them are unsharded and when, and in which order
// their gradients are reduced.
//
// A unit is unsharded before it is used, ahead of use where the order is known,
// and no longer than needed. The prediction is that a use is followed by what
// followed it the last time. All decisions depend on the order of calls alone,
// never on time, so all ranks issue their all-gathers in one order.
//
// Gradients are reduced in one order on all ranks: later units first, each one
// as soon as it and all units before it in that order are complete, so that
// communication overlaps with backward. What is incomplete when a round ends is
// reduced then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "echelon/parallel/shard/flat_buffer.h"

namespace echelon::sharding {

/// Parameters that are unsharded, resharded and reduced together.
struct Unit {
  /// One round of reduction: the backward passes between two begin_round().
  struct Round {
    size_t num_arrived = 0;                  // gradients
    std::vector<std::vector<bool>> arrived;  // by flat buffer and parameter
    bool launched = false;                   // its reduction has started
  };
  /// One optimizer step.
  struct Step {
    bool used = false;     // some gradient arrived
    bool reduced = false;  // in the last round
  };

  std::string name;
  std::vector<std::unique_ptr<FlatBuffer>> flats;
  size_t num_trainable = 0;  // parameters
  size_t pins = 0;           // uses in progress
  Round round;
  Step step;

  bool unsharded() const;
  bool resharded() const;  // neither unsharded nor being unsharded
  int64_t unsharded_bytes() const;
  void start_unshard();
  void finish_unshard();
  void begin_round();
};

using Units = std::vector<std::unique_ptr<Unit>>;

/// Not thread-safe.
class UnshardedUnits {
 public:
  /// A node of the autograd graph: the thread that made it, and its number
  /// there. Its address would not do: another node may get the same one later,
  /// and on some ranks only. None in forward.
  using Node = std::optional<std::pair<uint64_t, uint64_t>>;

  /// `keep`: units stay unsharded until reset_order(). Otherwise a unit is
  /// resharded when other units are used.
  UnshardedUnits(Units& units, const ShardOptions& options, bool keep)
      : units_(units), options_(options), keep_(keep) {}

  /// Registers units that are used together, for use(). Until uses have shown
  /// another order, sets are expected in the order of registration.
  size_t make_set(std::vector<size_t> units);
  /// The set of exactly these units, registered if it is new.
  size_t find_set(const std::vector<size_t>& units);
  const std::vector<size_t>& set(size_t index) const { return sets_[index]; }

  /// Returns when the set's units are unsharded.
  ///
  ///   node  the autograd node that backward is running; none in forward
  ///   last  this is the step's last backward: no forward follows
  void use(size_t set, const Node& node, bool last);
  /// The same where `node` itself reads the units: they stay unsharded until
  /// the node has ended, whatever else is used meanwhile (a recomputed layer).
  void use_by_node(size_t set, const Node& node, bool last);
  /// A pinned unit is not resharded.
  void pin(const std::vector<size_t>& units);
  void unpin(const std::vector<size_t>& units);
  /// Reshards the unit unless it is pinned or kept.
  void reshard(size_t unit);
  /// A new step: the values are out of date, and the order of uses starts
  /// again.
  void reset_order();

  bool keeps() const { return keep_; }

 private:
  struct Use {
    size_t set = 0;
    bool backward = false;
    auto operator<=>(const Use&) const = default;
  };

  /// A use and the one before it, which tells two uses of one set apart.
  using Context = std::pair<std::optional<Use>, Use>;

  std::optional<Use> use_after(const Context& context) const;
  std::vector<size_t> units_to_prefetch(bool last) const;
  bool ready(const std::vector<size_t>& units) const;
  bool read_by(const Node& node, size_t unit) const;

  Units& units_;
  ShardOptions options_;
  bool keep_;
  std::vector<std::vector<size_t>> sets_;
  std::map<std::vector<size_t>, size_t> set_of_units_;
  std::optional<Use> previous_, current_;
  std::map<Context, Use> next_;
  Node reader_;               // that last read units
  std::vector<size_t> read_;  // units that reader_ reads
};

/// Not thread-safe. Every rank begins and ends the same rounds.
class UnitReducer {
 public:
  UnitReducer(Units& units, ShardContext& context)
      : units_(units), context_(context) {}

  /// Ends the previous round. `units`: whose gradients will arrive; empty: all.
  /// `reduce` false leaves the gradients unsharded.
  void begin_round(std::vector<size_t> units, bool reduce, bool last);
  /// Begins a round of all units, which are reduced, if none has begun.
  void begin_default_round();
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
