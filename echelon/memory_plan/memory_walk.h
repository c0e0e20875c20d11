// A walk over one rank's step, event by event, and what it adds up: bytes held,
// pooled buffers and calls, and which parameters and gradients ShardedUnits
// holds when. Free of LibTorch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "echelon/memory_plan/memory_plan.h"

namespace echelon::memory_plan::detail {

/// The bytes that a rank holds now, and at its fullest moment.
class MemoryTally {
 public:
  void hold(timeline::MemoryKind kind, int64_t bytes) { now_[kind] += bytes; }
  void drop(timeline::MemoryKind kind, int64_t bytes) { now_[kind] -= bytes; }
  void hold_on_host(int64_t bytes);
  void drop_on_host(int64_t bytes) { host_ -= bytes; }
  /// A moment at which the rank holds `more` as well.
  void moment(const std::string& what, const timeline::MemoryByKind& more = {});
  void forget_peak();

  const timeline::MemoryByKind& now() const { return now_; }
  const timeline::MemoryByKind& peak() const { return peak_; }
  const std::string& peak_moment() const { return moment_; }
  int64_t host_peak() const { return host_peak_; }

 private:
  timeline::MemoryByKind now_;
  timeline::MemoryByKind peak_;
  std::string moment_;
  int64_t host_ = 0;
  int64_t host_peak_ = 0;
};

/// Blocks by size that are kept when they are returned
/// (parallel/shard/buffer_pool.h). An idle block stays of the kind it had.
class PooledBytes {
 public:
  explicit PooledBytes(MemoryTally& tally) : tally_(tally) {}
  void take(int64_t bytes, timeline::MemoryKind kind);
  void give(int64_t bytes, timeline::MemoryKind kind);
  /// Called when a step has ended.
  void trim();

 private:
  struct Size {
    std::vector<timeline::MemoryKind> idle;
    int64_t used = 0;
    int64_t peak = 0;
  };
  MemoryTally& tally_;
  std::map<int64_t, Size> sizes_;
};

/// Adds up the calls of each kind, once it is turned on.
class CallList {
 public:
  void turn_on() { on_ = true; }
  bool on() const { return on_; }
  void
  add(const std::string& operation, const std::string& axis,
      const std::string& what, int64_t bytes, int64_t count = 1);
  std::vector<PlannedCalls> take() { return std::move(list_); }

 private:
  bool on_ = false;
  std::vector<PlannedCalls> list_;
};

/// Whether ShardedUnits holds the parameters; else plain data parallelism does.
bool shards_state(const Job& job);

/// The optimizer's state of a trained parameter, in copies of it.
int64_t optimizer_copies(const OptimizerOptions& options);

/// The units of one rank, one for each layer.
class PlannedUnits {
 public:
  /// Parameters in one flat buffer. Each rank keeps a range of it.
  struct Flat {
    int64_t slot = 0;  // elements
    int64_t unsharded = 0;
    int64_t replicas = 1;  // ranks that have the same shard
    bool trains = true;
  };

  /// All arguments outlive it.
  PlannedUnits(
      const MemoryModel& model, const Job& job, bool unshard_once,
      MemoryTally& tally, CallList& calls);

  /// Makes what persists of a layer's unit. Called in the order of the layers.
  void make(size_t layer);
  /// Lists each use of a step in its order, before the first step.
  void will_use(size_t layer);

  void begin_step();
  /// As UnshardedUnits does when a layer is used.
  void use(size_t layer);
  /// Holds the unreduced gradients of the units that the layer uses.
  void fill_gradients(size_t layer);
  /// A backward pass of a stage begins.
  void begin_round();
  /// The layer's gradients are complete; its stage has the layers [begin, end).
  void complete_gradients(size_t layer, size_t begin, size_t end, bool last);
  /// All backwards have ended.
  void finish();
  /// The optimizer has updated.
  void end_step();

 private:
  struct Unit {
    std::string name;
    std::vector<Flat> flats;
    bool unsharded = false;
    bool filling = false;  // holds its unreduced gradient
  };

  void make_flat(const Flat& flat);
  void hold_state(timeline::MemoryKind kind, int64_t bytes);
  bool gradient_is_unsharded() const;
  std::vector<size_t> units_of(size_t layer) const;
  void start_unshard(size_t index);
  void release(Unit& unit, bool always = false);
  void launch(size_t index);
  void drain();
  void end_reduction(Unit& unit);
  void give_gradients(const Unit& unit);

  const MemoryModel& model_;
  const Job& job_;
  const bool unshard_once_;
  MemoryTally& tally_;
  CallList& calls_;
  PooledBytes pool_;
  const int64_t shards_;
  const int64_t replicas_;
  const bool offloads_;
  const bool offload_shards_;
  const bool keeps_unsharded_;
  const int64_t reduce_bytes_;

  std::vector<Unit> units_;
  std::map<size_t, size_t> unit_of_layer_;
  std::vector<std::vector<size_t>> uses_;
  size_t position_ = 0;
  std::set<size_t> complete_;
  std::set<size_t> started_;
  std::deque<size_t> in_flight_;
  std::vector<const Unit*> unsharded_gradients_;
};

/// The rank, and what it decided about unsharded parameters.
struct WalkOptions {
  int pipeline_rank = 0;
  bool unshard_once = false;
};

/// Walks a second step, when everything that persists has been made.
RankPlan
walk_step(const MemoryModel& model, const Job& job, const WalkOptions& options);

/// What each layer of the rank recomputes, as an index into `use`.
std::vector<size_t> recompute_choices(
    const MemoryModel& model, const MemoryOptions& options, int pipeline_rank);

}  // namespace echelon::memory_plan::detail
