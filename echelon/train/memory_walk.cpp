#include "echelon/train/memory_walk.h"

#include <algorithm>
#include <deque>
#include <numeric>
#include <set>
#include <utility>

#include "echelon/schedule/memory.h"

namespace echelon::detail {
namespace {

// As GradientReducer has it: larger gradients are reduced where they are.
constexpr int64_t kInPlaceBytes = 256 << 10;
// As parallel/shard/flat_buffer.h has it.
constexpr int64_t kAlignment = 16;

int64_t round_up(int64_t value, int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

// State of the optimizer, in copies of a trained parameter.
int64_t optimizer_copies(const OptimizerOptions& options) {
  if (options.name == "sgd") return options.momentum > 0 ? 1 : 0;
  return 2;
}

MemoryByKind only(MemoryKind kind, int64_t bytes) {
  MemoryByKind memory;
  memory[kind] = bytes;
  return memory;
}

// Parameters in one flat buffer, of which each rank keeps a range.
struct Flat {
  int64_t slot = 0;   // elements
  int64_t whole = 0;
  bool trains = true;

  Flat() = default;
  Flat(const std::vector<PlannedParameter>& list, bool training, int64_t ranks)
      : trains(training) {
    int64_t end = 0;
    for (const bool decays : {true, false}) {
      for (const auto& one : list) {
        if (one.decays != decays || one.trains != training) continue;
        end = round_up(end, kAlignment) + one.numel;
      }
    }
    if (end == 0) return;
    slot = round_up(round_up(end, ranks) / ranks, kAlignment);
    whole = slot * ranks;
  }
};

struct Unit {
  std::string name;
  std::vector<Flat> flats;
  bool gathered = false;
  bool filling = false;  // has its whole gradient
};

class StepWalk {
 public:
  StepWalk(const MemoryModel& model, const Job& job, const WalkOptions& options)
      : model_(model),
        job_(job),
        options_(options),
        schedule_(model.schedule),
        pool_(tally_),
        choices_(recompute_choices(model, job, options.pipeline_rank)) {
    for (const int32_t stage : schedule_.stages_of(options.pipeline_rank)) {
      for (size_t i = begin_of(stage); i < end_of(stage); ++i) {
        layers_.push_back(i);
      }
    }
    shards_ = job.layout.dp_shard;
    replicas_ = job.layout.dp_replicate;
    // Plain data parallelism, where nothing asks for more.
    sharded_ = shards_ > 1 || job.precision.compute != "same" ||
               job.memory.offload != "none";
    offload_shards_ = job.memory.offload == "parameters";
    offloads_ = job.memory.offload != "none";
    keeps_whole_ = !offload_shards_ && (job.shard.stage < 3 || shards_ == 1);
    reduce_bytes_ = job.precision.reduce == "float32" ? 4
        : job.precision.reduce == "bf16"              ? 2
                                                      : model.compute_bytes;
  }

  RankPlan run() {
    make_states();
    list_uses();
    for (const bool counts : {false, true}) {
      counting_ = counts;
      if (counts) {
        tally_.forget_peak();
        plan_.resting = tally_.now();
      }
      step();
    }
    plan_.pipeline_rank = options_.pipeline_rank;
    plan_.peak = tally_.peak();
    plan_.moment = tally_.peak_moment();
    plan_.host_bytes = tally_.host_peak();
    return plan_;
  }

 private:
  struct Use {
    std::vector<size_t> units;
    bool backward = false;
  };

  size_t begin_of(int32_t stage) const {
    return model_.boundaries[static_cast<size_t>(stage)];
  }
  size_t end_of(int32_t stage) const {
    return model_.boundaries[static_cast<size_t>(stage) + 1];
  }
  const LayerUse& use_of(size_t layer) const {
    return model_.layers[layer].use[choices_[layer]];
  }

  // ------------------------------------------------------------------- states

  void make_states() {
    if (model_.batch_bytes > 0) {
      tally_.hold(MemoryKind::working, model_.batch_bytes);
    }
    for (const size_t layer : layers_) {
      const auto& one = model_.layers[layer];
      tally_.hold(MemoryKind::parameters, one.buffer_bytes);
      if (sharded_) {
        make_unit(one);
      } else {
        make_plain(one);
      }
    }
  }

  void make_plain(const PlannedLayer& layer) {
    int64_t trained = 0;
    for (const auto& one : layer.parameters) {
      const int64_t bytes = one.numel * model_.master_bytes;
      tally_.hold(MemoryKind::parameters, bytes);
      if (!one.trains) continue;
      trained += bytes;
    }
    tally_.hold(
        MemoryKind::optimizer_state,
        optimizer_copies(job_.optimizer) * trained);
  }

  void make_unit(const PlannedLayer& layer) {
    Unit unit{.name = layer.name};
    for (const bool trains : {true, false}) {
      Flat flat(layer.parameters, trains, shards_);
      if (flat.whole > 0) unit.flats.push_back(flat);
    }
    const auto index = units_.size();
    unit_of_layer_[index_of(layer)] = index;
    for (const auto& flat : unit.flats) make_flat(flat);
    units_.push_back(std::move(unit));
  }

  size_t index_of(const PlannedLayer& layer) const {
    return static_cast<size_t>(&layer - model_.layers.data());
  }

  void make_flat(const Flat& flat) {
    const int64_t shard = flat.slot * model_.master_bytes;
    const int64_t whole = flat.whole * model_.compute_bytes;
    const bool shares = keeps_whole_ && !offloads_ &&
                        model_.compute_bytes == model_.master_bytes;
    if (shares) {
      tally_.hold(MemoryKind::parameters, whole);
    } else {
      if (keeps_whole_) tally_.hold(MemoryKind::gathered, whole);
      hold_state(MemoryKind::parameters, shard);
      if (!keeps_whole_ && offloads_ && !offload_shards_) {
        tally_.hold(MemoryKind::parameters, flat.slot * model_.compute_bytes);
      }
    }
    if (!flat.trains) return;
    hold_state(
        MemoryKind::optimizer_state, optimizer_copies(job_.optimizer) * shard);
    if (!gradient_is_whole()) hold_state(MemoryKind::gradients, shard);
  }

  void hold_state(MemoryKind kind, int64_t bytes) {
    if (offloads_ && !model_.host_is_device) {
      tally_.hold_on_host(bytes);
    } else {
      tally_.hold(kind, bytes);
    }
  }

  bool gradient_is_whole() const {
    return shards_ == 1 && !offloads_ && reduce_bytes_ == model_.master_bytes;
  }

  // The unit of the layer, and of the parameters that it uses of others.
  std::vector<size_t> units_of(size_t layer) const {
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

  // --------------------------------------------------------------------- step

  // Every action's layers, in the order of their use.
  void list_uses() {
    for (const auto& action : actions()) {
      std::vector<size_t> layers;
      for (size_t i = begin_of(action.stage); i < end_of(action.stage); ++i) {
        layers.push_back(i);
      }
      const bool backward = action.kind != ActionKind::forward;
      if (backward) std::reverse(layers.begin(), layers.end());
      for (const size_t layer : layers) {
        if (auto units = units_of(layer); !units.empty()) {
          uses_.push_back({std::move(units), backward});
        }
      }
    }
  }

  const std::vector<Action>& actions() const {
    return schedule_.ranks[static_cast<size_t>(options_.pipeline_rank)];
  }

  void step() {
    position_ = 0;
    started_.clear();
    std::map<int32_t, int32_t> backwards;  // by stage, done
    for (const auto& action : actions()) {
      const bool forward = action.kind == ActionKind::forward;
      if (forward) {
        run_forward(action);
        continue;
      }
      const bool last_half = action.kind != ActionKind::backward_input;
      int32_t& done = backwards[action.stage];
      const bool first = done == 0;
      if (last_half) ++done;
      run_backward(
          action, first, done == schedule_.num_microbatches, last_half);
    }
    if (sharded_) finish_units();
    sum_ties();
    tally_.moment("the optimizer's step");
    tally_.drop(MemoryKind::gradients, plain_gradients_);
    plain_gradients_ = 0;
    tally_.drop(MemoryKind::communication, bucket_now_);
    bucket_now_ = 0;
    if (!sharded_ && counting_) list_buckets();
    if (sharded_ && keeps_whole_ && counting_ && shards_ > 1) {
      for (const auto& unit : units_) {
        for (const auto& flat : unit.flats) {
          call("all_gather", "dp_shard", "parameters of " + unit.name,
               flat.slot * model_.compute_bytes);
        }
      }
    }
    if (options_.gather_once) {
      for (auto& unit : units_) release(unit, true);
    }
    pool_.trim();
  }

  std::string place(const std::string& what, const Action& action) const {
    return what + (schedule_.num_microbatches > 1
                       ? ", microbatch " + std::to_string(action.microbatch)
                       : "");
  }

  int64_t stored(int64_t bytes) const {
    if (job_.memory.activations == "bf16" && model_.compute_bytes > 2) {
      return bytes * 2 / model_.compute_bytes;
    }
    return bytes;
  }

  int64_t kept_by(size_t layer, int32_t stage) const {
    const auto& use = use_of(layer);
    return use.kept_bytes + (layer == begin_of(stage) ? use.repeated_bytes : 0);
  }

  void keep(int64_t bytes, int sign) {
    if (job_.memory.activations == "offload" && !model_.host_is_device) {
      sign > 0 ? tally_.hold_on_host(bytes) : tally_.drop_on_host(bytes);
      return;
    }
    tally_.hold(MemoryKind::activations, sign * stored(bytes));
  }

  void run_forward(const Action& action) {
    int64_t arriving = 0;
    for (size_t i = begin_of(action.stage); i < end_of(action.stage); ++i) {
      const auto& layer = model_.layers[i];
      if (sharded_) use_units(i);
      auto more =
          only(MemoryKind::working, use_of(i).forward_peak_bytes + arriving);
      if (i == begin_of(action.stage) && action.stage > 0) {
        more[MemoryKind::communication] += layer.input_bytes;
      }
      tally_.moment(place("forward of " + layer.name, action), more);
      keep(kept_by(i, action.stage), 1);
      add_calls(layer.forward_calls, 1);
      if (i + 1 < end_of(action.stage)) {
        arriving = model_.layers[i + 1].input_bytes;
      } else if (action.stage + 1 < schedule_.num_stages()) {
        tally_.moment(
            place("output of " + layer.name, action),
            only(MemoryKind::communication, layer.output_bytes));
        if (schedule_.rank_of_stage[static_cast<size_t>(action.stage) + 1] !=
            options_.pipeline_rank) {
          call("send", "pp", "activations", layer.output_bytes);
        }
      }
    }
  }

  void run_backward(
      const Action& action, bool first, bool last, bool completes) {
    if (sharded_ && completes) begin_round();
    for (size_t i = end_of(action.stage); i-- > begin_of(action.stage);) {
      const auto& layer = model_.layers[i];
      const auto& use = use_of(i);
      if (sharded_) use_units(i);
      const std::string what = place("backward of " + layer.name, action);
      int64_t trained = 0;
      int64_t largest = 0;
      for (const auto& one : layer.parameters) {
        if (!one.trains) continue;
        const int64_t bytes = one.numel * model_.compute_bytes;
        trained += bytes;
        largest = std::max(largest, bytes);
      }
      MemoryByKind more;
      if (!completes || sharded_ || !first) {
        if (sharded_ && completes) fill_gradients(i);
        more[MemoryKind::working] =
            use.backward_working_bytes + (completes ? largest : 0);
      } else {
        more[MemoryKind::working] =
            use.backward_peak_bytes - use.backward_peak_gradient_bytes;
        more[MemoryKind::gradients] = use.backward_peak_gradient_bytes;
      }
      // What backward frees of it is counted against its peak.
      tally_.moment(what, more);
      if (completes) {
        keep(kept_by(i, action.stage), -1);
        add_calls(layer.backward_calls[choices_[i]], 1);
        if (sharded_) {
          complete_gradients(i, action.stage, last);
        } else if (first) {
          tally_.hold(MemoryKind::gradients, trained);
          plain_gradients_ += trained;
          hold_bucket(layer);
        }
      }
    }
    const size_t begin = begin_of(action.stage);
    const bool sends = action.stage > 0 &&
        action.kind != ActionKind::backward_weight &&
        schedule_.rank_of_stage[static_cast<size_t>(action.stage) - 1] !=
            options_.pipeline_rank;
    if (sends) {
      call("send", "pp", "gradients", model_.layers[begin].input_bytes);
    }
  }

  // What TiedParameters does: the others' gradients arrive, and a sum is made.
  void sum_ties() {
    for (const auto& tie : model_.ties) {
      const auto own = std::count_if(
          tie.layers.begin(), tie.layers.end(), [&](size_t layer) {
            return contains(layers_, layer);
          });
      const auto others = static_cast<int64_t>(tie.layers.size()) - own;
      if (own == 0 || others == 0) continue;
      const int64_t bytes =
          (tie.numel + shards_ - 1) / shards_ * model_.master_bytes;
      tally_.moment(
          "sum of tied gradients",
          only(MemoryKind::working, (others + 1) * bytes));
      call("send", "pp", "gradients of tied parameters", own * others * bytes,
           own * others);
    }
  }

  // ------------------------------------------------- plain data parallelism

  // Small gradients are copied together before they are reduced.
  void hold_bucket(const PlannedLayer& layer) {
    if (shards_ * replicas_ == 1) return;
    for (const auto& one : layer.parameters) {
      const int64_t bytes = one.numel * model_.master_bytes;
      if (!one.trains || bytes >= kInPlaceBytes) continue;
      tally_.hold(MemoryKind::communication, bytes);
      bucket_now_ += bytes;
    }
    while (bucket_now_ > job_.train.bucket_bytes) {
      tally_.drop(MemoryKind::communication, job_.train.bucket_bytes);
      bucket_now_ -= job_.train.bucket_bytes;
    }
  }

  void list_buckets() {
    if (shards_ * replicas_ == 1) return;
    int64_t small = 0;
    for (const size_t i : layers_) {
      for (const auto& one : model_.layers[i].parameters) {
        const int64_t bytes = one.numel * model_.master_bytes;
        if (!one.trains) continue;
        if (bytes < kInPlaceBytes) {
          small += bytes;
        } else {
          call("all_reduce", "dp", "gradients of " + model_.layers[i].name,
               bytes);
        }
      }
    }
    if (small == 0) return;
    constexpr int64_t kFirst = 1 << 20;
    const int64_t buckets = 1 +
        (std::max<int64_t>(0, small - kFirst) + job_.train.bucket_bytes - 1) /
            std::max<int64_t>(1, job_.train.bucket_bytes);
    call("all_reduce", "dp", "small gradients together", small, buckets);
  }

  // ------------------------------------------------------------ sharded units

  void start_gather(size_t index) {
    Unit& unit = units_[index];
    if (unit.gathered) return;
    unit.gathered = true;
    for (const auto& flat : unit.flats) {
      pool_.take(flat.whole * model_.compute_bytes, MemoryKind::gathered);
      if (shards_ > 1) {
        call("all_gather", "dp_shard", "parameters of " + unit.name,
             flat.slot * model_.compute_bytes);
      }
    }
  }

  void release(Unit& unit, bool always = false) {
    if (!unit.gathered || (options_.gather_once && !always)) return;
    unit.gathered = false;
    for (const auto& flat : unit.flats) {
      pool_.give(flat.whole * model_.compute_bytes, MemoryKind::gathered);
    }
  }

  // What GatheredUnits does when a layer is used.
  void use_units(size_t layer) {
    const auto units = units_of(layer);
    if (units.empty()) return;
    const size_t at = position_++;
    if (keeps_whole_) return;
    std::vector<size_t> ahead;
    int64_t bytes = 0;
    for (size_t next = at + 1; next < uses_.size(); ++next) {
      if (static_cast<int64_t>(ahead.size()) >= job_.shard.prefetch) break;
      for (const size_t unit : uses_[next].units) {
        if (contains(units, unit) || contains(ahead, unit)) continue;
        for (const auto& flat : units_[unit].flats) {
          bytes += flat.whole * model_.compute_bytes;
        }
        if (job_.shard.prefetch_bytes > 0 &&
            bytes > job_.shard.prefetch_bytes) {
          next = uses_.size();
          break;
        }
        ahead.push_back(unit);
      }
    }
    for (size_t i = 0; i < units_.size(); ++i) {
      if (!contains(units, i) && !contains(ahead, i)) release(units_[i]);
    }
    for (const size_t unit : units) start_gather(unit);
    for (const size_t unit : ahead) start_gather(unit);
  }

  static bool contains(const std::vector<size_t>& list, size_t value) {
    return std::find(list.begin(), list.end(), value) != list.end();
  }

  void fill_gradients(size_t layer) {
    for (const size_t index : units_of(layer)) {
      Unit& unit = units_[index];
      if (std::exchange(unit.filling, true)) continue;
      for (const auto& flat : unit.flats) {
        if (flat.trains) {
          pool_.take(flat.whole * reduce_bytes_, MemoryKind::gradients);
        }
      }
    }
  }

  void begin_round() {
    drain();
    complete_.clear();
    started_.clear();
  }

  // A unit is reduced when its own layer's gradients came, which are the last,
  // and the later units of the stage were.
  void complete_gradients(size_t layer, int32_t stage, bool last) {
    const auto own = unit_of_layer_.find(layer);
    if (own != unit_of_layer_.end()) complete_.insert(own->second);
    // A pipeline that gathers once keeps gradients whole as well.
    const bool once = options_.gather_once && job_.layout.pp > 1;
    if (!last && (job_.shard.stage < 2 || shards_ == 1 || once)) return;
    for (size_t i = end_of(stage); i-- > begin_of(stage);) {
      const size_t unit = unit_of_layer_.at(i);
      if (started_.contains(unit) || units_[unit].flats.empty()) continue;
      if (!complete_.contains(unit)) break;
      launch(unit);
      release(units_[unit]);
    }
  }

  void launch(size_t index) {
    Unit& unit = units_[index];
    drain();
    started_.insert(index);
    for (const auto& flat : unit.flats) {
      if (!flat.trains) continue;
      const int64_t whole = flat.whole * reduce_bytes_;
      if (shards_ > 1) {
        call("reduce_scatter", "dp_shard", "gradients of " + unit.name, whole);
      }
      if (replicas_ > 1) {
        call("all_reduce", "dp_replicate", "gradients of " + unit.name,
             whole / shards_);
      }
    }
    in_flight_.push_back(index);
  }

  void drain() {
    while (!in_flight_.empty()) {
      end_reduction(units_[in_flight_.front()]);
      in_flight_.pop_front();
    }
  }

  void end_reduction(Unit& unit) {
    if (!std::exchange(unit.filling, false)) return;
    if (gradient_is_whole()) {
      whole_.push_back(&unit);
      return;
    }
    give_gradients(unit);
  }

  void give_gradients(const Unit& unit) {
    for (const auto& flat : unit.flats) {
      if (flat.trains) {
        pool_.give(flat.whole * reduce_bytes_, MemoryKind::gradients);
      }
    }
  }

  void finish_units() {
    for (size_t i = units_.size(); i-- > 0;) {
      if (units_[i].filling && !started_.contains(i)) launch(i);
    }
    drain();
    for (const Unit* unit : whole_) give_gradients(*unit);
    whole_.clear();
    complete_.clear();
    started_.clear();
    if (!options_.gather_once) {
      for (auto& unit : units_) release(unit);
    }
  }

  // -------------------------------------------------------------------- calls

  void call(
      const std::string& operation, const std::string& axis,
      const std::string& what, int64_t bytes, int64_t count = 1) {
    if (!counting_ || bytes == 0) return;
    for (auto& known : plan_.calls) {
      if (known.operation != operation || known.axis != axis ||
          known.what != what) {
        continue;
      }
      known.count += count;
      known.bytes += bytes;
      return;
    }
    plan_.calls.push_back({operation, axis, what, count, bytes});
  }

  void add_calls(const std::vector<PlannedCalls>& calls, int64_t times) {
    for (const auto& one : calls) {
      call(one.operation, one.axis, one.what, one.bytes * times,
           one.count * times);
    }
  }

  const MemoryModel& model_;
  const Job& job_;
  const WalkOptions options_;
  const Schedule& schedule_;
  MemoryTally tally_;
  PooledBytes pool_;
  std::vector<size_t> choices_;
  std::vector<size_t> layers_;  // of this rank
  int64_t shards_ = 1;
  int64_t replicas_ = 1;
  bool sharded_ = false;
  bool offloads_ = false;
  bool offload_shards_ = false;
  bool keeps_whole_ = true;
  int64_t reduce_bytes_ = 4;

  std::vector<Unit> units_;
  std::map<size_t, size_t> unit_of_layer_;
  std::vector<Use> uses_;
  size_t position_ = 0;
  std::set<size_t> complete_;
  std::set<size_t> started_;
  std::deque<size_t> in_flight_;
  std::vector<const Unit*> whole_;

  int64_t plain_gradients_ = 0;
  int64_t bucket_now_ = 0;
  bool counting_ = false;
  RankPlan plan_;
};

}  // namespace

void MemoryTally::hold_on_host(int64_t bytes) {
  host_ += bytes;
  host_peak_ = std::max(host_peak_, host_);
}

void MemoryTally::moment(const std::string& what, const MemoryByKind& more) {
  if (now_.total() + more.total() <= peak_.total()) return;
  peak_ = now_;
  for (const MemoryKind kind : kMemoryKinds) peak_[kind] += more[kind];
  moment_ = what;
}

void MemoryTally::forget_peak() {
  peak_ = now_;
  moment_ = "between two steps";
}

void PooledBytes::take(int64_t bytes, MemoryKind kind) {
  if (bytes == 0) return;
  Size& size = sizes_[bytes];
  size.peak = std::max(size.peak, ++size.used);
  if (!size.idle.empty()) {
    tally_.drop(size.idle.back(), bytes);
    size.idle.pop_back();
  }
  tally_.hold(kind, bytes);
}

void PooledBytes::give(int64_t bytes, MemoryKind kind) {
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

std::vector<size_t> recompute_choices(
    const MemoryModel& model, const Job& job, int pipeline_rank) {
  const auto none = static_cast<size_t>(Recompute::none);
  std::vector<size_t> choices(model.layers.size(), none);
  const auto& options = job.memory;
  if (options.recompute == "none") return choices;
  const auto all = recompute_costs(model);
  std::vector<size_t> own;
  std::vector<RecomputeCost> costs;
  for (const int32_t stage : model.schedule.stages_of(pipeline_rank)) {
    const auto at = static_cast<size_t>(stage);
    for (size_t i = model.boundaries[at]; i < model.boundaries[at + 1]; ++i) {
      if (i == all.size()) continue;  // the loss
      own.push_back(i);
      costs.push_back(all[i]);
    }
  }
  const auto stored = stored_activations(model.schedule);
  const auto chosen = plan_recompute(
      options, costs,
      std::max(1, stored.ranks[static_cast<size_t>(pipeline_rank)]));
  for (size_t i = 0; i < own.size(); ++i) {
    choices[own[i]] = static_cast<size_t>(chosen[i]);
  }
  return choices;
}

RankPlan
walk_step(const MemoryModel& model, const Job& job, const WalkOptions& options) {
  return StepWalk(model, job, options).run();
}

}  // namespace echelon::detail
