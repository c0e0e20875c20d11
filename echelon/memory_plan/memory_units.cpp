// What parallel/shard/units.cpp and flat_buffer.cpp do, in bytes: the same
// units, the same order of gathers and reductions, the same pooled blocks. The
// order of uses, which UnshardedUnits learns in its first steps, is given here
// by will_use(). A change there needs the same change here; sharded_step_test
// and memory_plan_command_test compare the two.
#include "echelon/memory_plan/memory_walk.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace echelon::memory_plan::detail {
namespace {

// The alignment of parallel/shard/flat_buffer.h.
constexpr int64_t kAlignment = 16;

int64_t round_up(int64_t value, int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

// A flat buffer of the parameters that train, or of those that do not.
// `experts`: of those alone; none: of all.
PlannedUnits::Flat flat_of(
    const std::vector<PlannedParameter>& list, bool training, int64_t ranks,
    std::optional<bool> experts) {
  PlannedUnits::Flat flat{.trains = training};
  int64_t end = 0;
  for (const bool decays : {true, false}) {
    for (const auto& one : list) {
      if (one.decays != decays || one.trains != training) continue;
      if (experts && one.expert != *experts) continue;
      end = round_up(end, kAlignment) + one.numel;
    }
  }
  if (end == 0) return flat;
  flat.slot = round_up(round_up(end, ranks) / ranks, kAlignment);
  flat.unsharded = flat.slot * ranks;
  return flat;
}

bool contains(const std::vector<size_t>& list, size_t value) {
  return std::ranges::find(list, value) != list.end();
}

}  // namespace

void MemoryTally::hold_on_host(int64_t bytes) {
  host_ += bytes;
  host_peak_ = std::max(host_peak_, host_);
}

void MemoryTally::moment(
    const std::string& what, const timeline::MemoryByKind& more) {
  if (now_.total() + more.total() <= peak_.total()) return;
  peak_ = now_;
  for (const timeline::MemoryKind kind : timeline::kMemoryKinds)
    peak_[kind] += more[kind];
  moment_ = what;
}

void MemoryTally::forget_peak() {
  peak_ = now_;
  moment_ = "between two steps";
}

void PooledBytes::take(int64_t bytes, timeline::MemoryKind kind) {
  if (bytes == 0) return;
  Size& size = sizes_[bytes];
  size.peak = std::max(size.peak, ++size.used);
  if (!size.idle.empty()) {
    tally_.drop(size.idle.back(), bytes);
    size.idle.pop_back();
  }
  tally_.hold(kind, bytes);
}

void PooledBytes::give(int64_t bytes, timeline::MemoryKind kind) {
  if (bytes == 0) return;
  Size& size = sizes_[bytes];
  --size.used;
  size.idle.push_back(kind);
}

void PooledBytes::trim() {
  for (auto& [bytes, size] : sizes_) {
    const auto needed = static_cast<size_t>(size.peak - size.used);
    while (size.idle.size() > needed) {
      tally_.drop(size.idle.back(), bytes);
      size.idle.pop_back();
    }
    size.peak = size.used;
  }
}

void CallList::add(
    const std::string& operation, const std::string& axis,
    const std::string& what, int64_t bytes, int64_t count) {
  if (!on_ || bytes == 0) return;
  const auto known = std::ranges::find_if(list_, [&](const auto& one) {
    return one.operation == operation && one.axis == axis && one.what == what;
  });
  if (known == list_.end()) {
    list_.push_back({operation, axis, what, count, bytes});
  } else {
    known->count += count;
    known->bytes += bytes;
  }
}

bool shards_state(const Job& job) {
  return job.layout.dp_shard > 1 || in_16_bits(job.precision.compute) ||
         job.memory.offload != Offload::none;
}

int64_t optimizer_copies(const OptimizerOptions& options) {
  if (options.name == OptimizerKind::sgd) return options.momentum > 0 ? 1 : 0;
  return 2;
}

PlannedUnits::PlannedUnits(
    const MemoryModel& model, const Job& job, bool unshard_once,
    MemoryTally& tally, CallList& calls)
    : model_(model),
      job_(job),
      unshard_once_(unshard_once),
      tally_(tally),
      calls_(calls),
      pool_(tally),
      shards_(job.layout.dp_shard),
      replicas_(job.layout.dp_replicate),
      offloads_(job.memory.offload != Offload::none),
      offload_shards_(job.memory.offload == Offload::parameters),
      keeps_unsharded_(
          !offload_shards_ && (job.shard.stage < 3 || shards_ == 1)),
      reduce_bytes_(
          job.precision.reduce == ReduceDtype::float32 ? 4
          : job.precision.reduce == ReduceDtype::bf16  ? 2
                                                       : model.compute_bytes) {}

void PlannedUnits::make(size_t layer) {
  const auto& planned = model_.layers[layer];
  Unit unit;
  unit.name = planned.name;
  for (const bool trains : {true, false}) {
    const auto add = [&](int64_t ranks, int64_t replicas,
                         std::optional<bool> experts) {
      auto flat = flat_of(planned.parameters, trains, ranks, experts);
      flat.replicas = replicas;
      if (flat.unsharded > 0) unit.flats.push_back(flat);
    };
    // Ranks of ep shard, or replicate, what is no expert too.
    const int64_t ep = job_.layout.ep;
    if (ep == 1) {
      add(shards_, replicas_, std::nullopt);
    } else {
      const bool cut = shards_ > 1;
      add(cut ? shards_ * ep : 1, cut ? replicas_ : replicas_ * ep, false);
      add(shards_, replicas_, true);
    }
  }
  unit_of_layer_[layer] = units_.size();
  for (const auto& flat : unit.flats) make_flat(flat);
  units_.push_back(std::move(unit));
}

void PlannedUnits::make_flat(const Flat& flat) {
  const int64_t shard = flat.slot * model_.master_bytes;
  const int64_t unsharded = flat.unsharded * model_.compute_bytes;
  const bool shares = keeps_unsharded_ && !offloads_ &&
                      model_.compute_bytes == model_.master_bytes;
  if (shares) {
    tally_.hold(timeline::MemoryKind::parameters, unsharded);
  } else {
    if (keeps_unsharded_)
      tally_.hold(timeline::MemoryKind::unsharded, unsharded);
    hold_state(timeline::MemoryKind::parameters, shard);
    if (!keeps_unsharded_ && offloads_ && !offload_shards_) {
      tally_.hold(
          timeline::MemoryKind::parameters, flat.slot * model_.compute_bytes);
    }
  }
  if (!flat.trains) return;
  hold_state(
      timeline::MemoryKind::optimizer_state,
      optimizer_copies(job_.optimizer) * shard);
  if (!gradient_is_unsharded())
    hold_state(timeline::MemoryKind::gradients, shard);
}

void PlannedUnits::hold_state(timeline::MemoryKind kind, int64_t bytes) {
  if (offloads_ && !model_.host_is_device) {
    tally_.hold_on_host(bytes);
  } else {
    tally_.hold(kind, bytes);
  }
}

bool PlannedUnits::gradient_is_unsharded() const {
  return shards_ == 1 && !offloads_ && reduce_bytes_ == model_.master_bytes;
}

// The units of the layer and of the other layers whose parameters it uses.
std::vector<size_t> PlannedUnits::units_of(size_t layer) const {
  std::vector<size_t> units;
  const auto add = [&](size_t of) {
    const auto found = unit_of_layer_.find(of);
    if (found == unit_of_layer_.end()) return;  // on another stage
    if (units_[found->second].flats.empty()) return;
    units.push_back(found->second);
  };
  add(layer);
  for (const size_t other : model_.layers[layer].tied_to) add(other);
  return units;
}

void PlannedUnits::will_use(size_t layer) {
  if (auto units = units_of(layer); !units.empty()) {
    uses_.push_back(std::move(units));
  }
}

void PlannedUnits::begin_step() {
  position_ = 0;
  started_.clear();
}

void PlannedUnits::start_unshard(size_t index) {
  Unit& unit = units_[index];
  if (unit.unsharded) return;
  unit.unsharded = true;
  for (const auto& flat : unit.flats) {
    pool_.take(
        flat.unsharded * model_.compute_bytes, timeline::MemoryKind::unsharded);
    if (shards_ > 1) {
      calls_.add(
          "all_gather", "dp_shard", "parameters of " + unit.name,
          flat.slot * model_.compute_bytes);
    }
  }
}

void PlannedUnits::release(Unit& unit, bool always) {
  if (!unit.unsharded || (unshard_once_ && !always)) return;
  unit.unsharded = false;
  for (const auto& flat : unit.flats) {
    pool_.give(
        flat.unsharded * model_.compute_bytes, timeline::MemoryKind::unsharded);
  }
}

// Unshards the units of the layer and of the next uses, and releases the rest.
void PlannedUnits::use(size_t layer) {
  const auto units = units_of(layer);
  if (units.empty()) return;
  const size_t at = position_++;
  if (keeps_unsharded_) return;
  std::vector<size_t> ahead;
  int64_t bytes = 0;
  for (size_t next = at + 1; next < uses_.size(); ++next) {
    if (static_cast<int64_t>(ahead.size()) >= job_.shard.prefetch) break;
    for (const size_t unit : uses_[next]) {
      if (contains(units, unit) || contains(ahead, unit)) continue;
      for (const auto& flat : units_[unit].flats) {
        bytes += flat.unsharded * model_.compute_bytes;
      }
      if (job_.shard.prefetch_bytes > 0 && bytes > job_.shard.prefetch_bytes) {
        next = uses_.size();
        break;
      }
      ahead.push_back(unit);
    }
  }
  for (size_t i = 0; i < units_.size(); ++i) {
    if (!contains(units, i) && !contains(ahead, i)) release(units_[i]);
  }
  for (const size_t unit : units) start_unshard(unit);
  for (const size_t unit : ahead) start_unshard(unit);
}

void PlannedUnits::fill_gradients(size_t layer) {
  for (const size_t index : units_of(layer)) {
    Unit& unit = units_[index];
    if (std::exchange(unit.filling, true)) continue;
    for (const auto& flat : unit.flats) {
      if (flat.trains) {
        pool_.take(
            flat.unsharded * reduce_bytes_, timeline::MemoryKind::gradients);
      }
    }
  }
}

void PlannedUnits::begin_round() {
  drain();
  complete_.clear();
  started_.clear();
}

// A unit is reduced when its own layer's gradients, which come last, are there
// and the later units of the stage have been reduced.
void PlannedUnits::complete_gradients(
    size_t layer, size_t begin, size_t end, bool last) {
  const auto own = unit_of_layer_.find(layer);
  if (own != unit_of_layer_.end()) complete_.insert(own->second);
  // A pipeline that unshards once keeps gradients unreduced as well.
  const bool once = unshard_once_ && job_.layout.pp > 1;
  if (!last && (job_.shard.stage < 2 || shards_ == 1 || once)) return;
  for (size_t i = end; i-- > begin;) {
    const size_t unit = unit_of_layer_.at(i);
    if (started_.contains(unit) || units_[unit].flats.empty()) continue;
    if (!complete_.contains(unit)) break;
    launch(unit);
    release(units_[unit]);
  }
}

void PlannedUnits::launch(size_t index) {
  Unit& unit = units_[index];
  drain();
  started_.insert(index);
  for (const auto& flat : unit.flats) {
    if (!flat.trains) continue;
    const int64_t unsharded = flat.unsharded * reduce_bytes_;
    if (shards_ > 1) {
      calls_.add(
          "reduce_scatter", "dp_shard", "gradients of " + unit.name, unsharded);
    }
    if (flat.replicas > 1) {
      calls_.add(
          "all_reduce", "dp_replicate", "gradients of " + unit.name,
          flat.slot * reduce_bytes_);
    }
  }
  in_flight_.push_back(index);
}

void PlannedUnits::drain() {
  while (!in_flight_.empty()) {
    end_reduction(units_[in_flight_.front()]);
    in_flight_.pop_front();
  }
}

void PlannedUnits::end_reduction(Unit& unit) {
  if (!std::exchange(unit.filling, false)) return;
  if (gradient_is_unsharded()) {
    unsharded_gradients_.push_back(&unit);
    return;
  }
  give_gradients(unit);
}

void PlannedUnits::give_gradients(const Unit& unit) {
  for (const auto& flat : unit.flats) {
    if (flat.trains) {
      pool_.give(
          flat.unsharded * reduce_bytes_, timeline::MemoryKind::gradients);
    }
  }
}

void PlannedUnits::finish() {
  for (size_t i = units_.size(); i-- > 0;) {
    if (units_[i].filling && !started_.contains(i)) launch(i);
  }
  drain();
  for (const Unit* unit : unsharded_gradients_) give_gradients(*unit);
  unsharded_gradients_.clear();
  complete_.clear();
  started_.clear();
  if (!unshard_once_) {
    for (auto& unit : units_) release(unit);
  }
}

void PlannedUnits::end_step() {
  if (keeps_unsharded_ && shards_ > 1) {
    for (const auto& unit : units_) {
      for (const auto& flat : unit.flats) {
        calls_.add(
            "all_gather", "dp_shard", "parameters of " + unit.name,
            flat.slot * model_.compute_bytes);
      }
    }
  }
  if (unshard_once_) {
    for (auto& unit : units_) release(unit, true);
  }
  pool_.trim();
}

}  // namespace echelon::memory_plan::detail
