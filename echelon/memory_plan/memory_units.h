// Sharded units in a walk over a step: what ShardedUnits holds of parameters
// and gradients, and when. Free of LibTorch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "echelon/memory_plan/memory_tally.h"

namespace echelon::detail {

/// Whether ShardedUnits has the parameters; else plain data parallelism.
bool cuts_state(const Job& job);

/// State of the optimizer, in copies of a trained parameter.
int64_t optimizer_copies(const OptimizerOptions& options);

/// The units of one rank, a layer each.
class PlannedUnits {
 public:
  /// Parameters in one flat buffer, of which each rank keeps a range.
  struct Flat {
    int64_t slot = 0;  // elements
    int64_t whole = 0;
    bool trains = true;
  };

  /// All outlive it.
  PlannedUnits(
      const MemoryModel& model, const Job& job, bool gather_once,
      MemoryTally& tally, CallList& calls);

  /// What there is of the layer's unit in every step; in the layers' order.
  void make(size_t layer);
  /// Each use of a step, in its order, before the first step.
  void will_use(size_t layer);

  void begin_step();
  /// What GatheredUnits does when a layer is used.
  void use(size_t layer);
  /// Whole gradients of what the layer uses, until they are reduced.
  void fill_gradients(size_t layer);
  /// A backward pass of a stage begins.
  void begin_round();
  /// The layer's gradients are there; its stage has the layers [begin, end).
  void complete_gradients(size_t layer, size_t begin, size_t end, bool last);
  /// All backwards have ended.
  void finish();
  /// The optimizer has updated.
  void end_step();

 private:
  struct Unit {
    std::string name;
    std::vector<Flat> flats;
    bool gathered = false;
    bool filling = false;  // has its whole gradient
  };

  void make_flat(const Flat& flat);
  void hold_state(MemoryKind kind, int64_t bytes);
  bool gradient_is_whole() const;
  std::vector<size_t> units_of(size_t layer) const;
  void start_gather(size_t index);
  void release(Unit& unit, bool always = false);
  void launch(size_t index);
  void drain();
  void end_reduction(Unit& unit);
  void give_gradients(const Unit& unit);

  const MemoryModel& model_;
  const Job& job_;
  const bool gather_once_;
  MemoryTally& tally_;
  CallList& calls_;
  PooledBytes pool_;
  const int64_t shards_;
  const int64_t replicas_;
  const bool offloads_;
  const bool offload_shards_;
  const bool keeps_whole_;
  const int64_t reduce_bytes_;

  std::vector<Unit> units_;
  std::map<size_t, size_t> unit_of_layer_;
  std::vector<std::vector<size_t>> uses_;
  size_t position_ = 0;
  std::set<size_t> complete_;
  std::set<size_t> started_;
  std::deque<size_t> in_flight_;
  std::vector<const Unit*> whole_;
};

}  // namespace echelon::detail
