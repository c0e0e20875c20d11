// Which units' parameters are gathered, and when: before they are used, ahead
// of it where that can be foreseen, and not longer than needed.
//
// What will be used next is what was used after it the last time. Everything
// here depends on the order of calls alone, never on time, so that all ranks
// gather in one order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "echelon/parallel/shard/flat_buffer.h"

namespace echelon::sharding {

/// Parameters that are gathered, freed and reduced together.
struct Unit {
  std::string name;
  std::vector<std::unique_ptr<FlatBuffer>> flats;
  size_t pins = 0;           // uses that are under way
  size_t num_trainable = 0;  // parameters
  size_t arrived = 0;        // of their gradients, in this round
  std::vector<std::vector<bool>> has_arrived;  // by flat and parameter
  bool launched = false;                       // its reduction of this round
  bool used = false;          // some gradient came in this step
  bool reduced_last = false;  // by the last round of this step

  bool gathered() const;
  bool idle() const;  // neither gathered nor on the way
  int64_t gathered_bytes() const;
};

using Units = std::vector<std::unique_ptr<Unit>>;

/// Not thread-safe.
class GatheredUnits {
 public:
  /// Of autograd, whatever it is; null in forward.
  using Node = std::shared_ptr<const void>;

  /// `keep`: until forget(); else a unit is freed when others are used.
  GatheredUnits(Units& units, const ShardOptions& options, bool keep)
      : units_(units), options_(options), keep_(keep) {}

  /// Units that are used together, for use(). Sets are expected to be used in
  /// the order that they were made, until use has shown another.
  size_t make_set(std::vector<size_t> units);
  /// The set of exactly these units, made when there is none.
  size_t find_set(const std::vector<size_t>& units);
  const std::vector<size_t>& set(size_t index) const { return sets_[index]; }

  /// Returns when the set's units are gathered.
  ///
  ///   node  of autograd, that backward computes; null in forward
  ///   last  the step's last backward: no forward follows
  void use(size_t set, const Node& node, bool last);
  /// The same for `node` itself, which reads them: they stay until it has
  /// ended, whatever is used meanwhile (a layer that is computed again).
  void use_by_node(size_t set, const Node& node, bool last);
  /// A unit with pins is not freed.
  void pin(const std::vector<size_t>& units);
  void unpin(const std::vector<size_t>& units);
  /// Frees the unit unless somebody uses it.
  void release(size_t unit);
  /// The values are out of date, and the order begins anew.
  void forget();

  bool keeps() const { return keep_; }

 private:
  struct Place {
    size_t set = 0;
    bool backward = false;
    auto operator<=>(const Place&) const = default;
  };

  /// The one before it tells two uses of a set apart.
  using Context = std::pair<std::optional<Place>, Place>;

  std::optional<Place> after(const Context& context) const;
  std::vector<size_t> ahead(bool last) const;
  bool ready(const std::vector<size_t>& units) const;
  bool is_reader(const Node& node) const;
  bool read_by(const Node& node, size_t unit) const;

  Units& units_;
  ShardOptions options_;
  bool keep_;
  std::vector<std::vector<size_t>> sets_;
  std::map<std::vector<size_t>, size_t> found_;
  std::optional<Place> before_, current_;
  std::map<Context, Place> next_;
  std::weak_ptr<const void>
      reader_;                // a node; not its address, which others get
                              // after it, on one rank and not on another
  std::vector<size_t> read_;  // units, by it
};

}  // namespace echelon::sharding
