// The walk runs a rank's actions in the order of the schedule, layer by layer,
// as PipelineRun does, and adds up bytes instead of computing. MemoryTally
// holds bytes by kind; a moment compares what is held, and what an operator
// needs besides, with the peak so far. Sharded parameters are left to
// PlannedUnits.
#include "echelon/memory_plan/memory_walk.h"

#include <algorithm>
#include <map>
#include <utility>

#include "echelon/schedule/memory.h"

namespace echelon::memory_plan::detail {
namespace {

// GradientReducer reduces larger gradients in place.
constexpr int64_t kInPlaceBytes = 256 << 10;

timeline::MemoryByKind only(timeline::MemoryKind kind, int64_t bytes) {
  timeline::MemoryByKind memory;
  memory[kind] = bytes;
  return memory;
}

class StepWalk {
 public:
  StepWalk(const MemoryModel& model, const Job& job, const WalkOptions& options)
      : model_(model),
        job_(job),
        options_(options),
        schedule_(model.schedule),
        choices_(recompute_choices(model, job.memory, options.pipeline_rank)),
        sharded_(shards_state(job)),
        units_(model, job, options.unshard_once, tally_, calls_) {
    for (const int32_t stage : schedule_.stages_of(options.pipeline_rank)) {
      for (size_t i = begin_of(stage); i < end_of(stage); ++i) {
        layers_.push_back(i);
      }
    }
  }

  // Walks through two steps: the first leaves behind what stays allocated from
  // step to step, and the second, which stands for all later ones, has the peak
  // and the calls.
  RankPlan run() {
    make_states();
    if (sharded_) list_uses();
    for (const bool counts : {false, true}) {
      if (counts) {
        calls_.turn_on();
        tally_.forget_peak();
        plan_.resting = tally_.now();
      }
      step();
    }
    plan_.pipeline_rank = options_.pipeline_rank;
    plan_.peak = tally_.peak();
    plan_.moment = tally_.peak_moment();
    plan_.host_bytes = tally_.host_peak();
    plan_.snapshot_bytes = snapshot_bytes();
    plan_.calls = calls_.take();
    return plan_;
  }

 private:
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
    tally_.hold(timeline::MemoryKind::working, model_.batch_bytes);
    for (const size_t layer : layers_) {
      const auto& one = model_.layers[layer];
      tally_.hold(timeline::MemoryKind::parameters, one.buffer_bytes);
      if (sharded_) {
        units_.make(layer);
      } else {
        make_plain(one);
      }
    }
  }

  void make_plain(const PlannedLayer& layer) {
    int64_t trained = 0;
    for (const auto& one : layer.parameters) {
      const int64_t bytes = one.numel * model_.master_bytes;
      tally_.hold(timeline::MemoryKind::parameters, bytes);
      if (one.trains) trained += bytes;
    }
    tally_.hold(
        timeline::MemoryKind::optimizer_state,
        optimizer_copies(job_.optimizer) * trained);
  }

  bool has(size_t layer) const {
    return std::ranges::find(layers_, layer) != layers_.end();
  }

  // A parameter and what the optimizer keeps of it.
  int64_t saved_bytes(int64_t numel, bool trains) const {
    const int64_t tensors = 1 + (trains ? optimizer_copies(job_.optimizer) : 0);
    return tensors * numel * model_.master_bytes;
  }

  // Data-parallel ranks share the writing, whether each has all of the state or
  // a shard. On CPUs a checkpoint that training waits for is written without a
  // copy.
  int64_t snapshot_bytes() const {
    const auto& options = job_.checkpoint;
    const bool copies =
        model_.host_is_device ? saves_in_background(options) : saves(options);
    if (!copies) return 0;
    int64_t bytes = 0;
    int64_t buffer_bytes = 0;  // all written by the first rank
    for (const size_t layer : layers_) {
      const auto& one = model_.layers[layer];
      buffer_bytes += one.buffer_bytes;
      for (const auto& parameter : one.parameters) {
        bytes += saved_bytes(parameter.numel, parameter.trains);
      }
    }
    // The first stage that has a tied parameter writes it.
    for (const auto& tie : model_.ties) {
      for (size_t i = 1; i < tie.layers.size(); ++i) {
        if (has(tie.layers[i])) bytes -= saved_bytes(tie.numel, tie.trains);
      }
    }
    const int64_t ranks = job_.layout.data_ranks();
    return (bytes + ranks - 1) / ranks + buffer_bytes;
  }

  // --------------------------------------------------------------------- step

  // Lists every action's layers in the order of their use.
  void list_uses() {
    for (const auto& action : actions()) {
      const size_t begin = begin_of(action.stage), end = end_of(action.stage);
      for (size_t i = begin; i < end; ++i) {
        const bool forward = action.kind == ActionKind::forward;
        units_.will_use(forward ? i : begin + end - 1 - i);
      }
    }
  }

  const std::vector<Action>& actions() const {
    return schedule_.ranks[static_cast<size_t>(options_.pipeline_rank)];
  }

  void step() {
    units_.begin_step();
    std::map<int32_t, int32_t> backwards;  // by stage, done
    for (const auto& action : actions()) {
      if (action.kind == ActionKind::forward) {
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
    if (sharded_) units_.finish();
    sum_ties();
    tally_.moment("the optimizer's step");
    tally_.drop(timeline::MemoryKind::gradients, plain_gradients_);
    plain_gradients_ = 0;
    tally_.drop(timeline::MemoryKind::communication, bucket_now_);
    bucket_now_ = 0;
    if (sharded_) {
      units_.end_step();
    } else if (calls_.on()) {
      list_buckets();
    }
  }

  std::string place(const std::string& what, const Action& action) const {
    return what + (schedule_.num_microbatches > 1
                       ? ", microbatch " + std::to_string(action.microbatch)
                       : "");
  }

  int64_t stored(int64_t bytes) const {
    if (job_.memory.activations == Activations::bf16 &&
        model_.compute_bytes > 2) {
      return bytes * 2 / model_.compute_bytes;
    }
    return bytes;
  }

  int64_t kept_by(size_t layer, int32_t stage) const {
    const auto& use = use_of(layer);
    return use.kept_bytes + (layer == begin_of(stage) ? use.repeated_bytes : 0);
  }

  void keep(int64_t bytes, int sign) {
    if (job_.memory.activations == Activations::offload &&
        !model_.host_is_device) {
      sign > 0 ? tally_.hold_on_host(bytes) : tally_.drop_on_host(bytes);
      return;
    }
    tally_.hold(timeline::MemoryKind::activations, sign * stored(bytes));
  }

  // Each layer's moment is its forward peak on top of what is held; what it
  // keeps for backward is held from then on.
  void run_forward(const Action& action) {
    int64_t arriving = 0;
    for (size_t i = begin_of(action.stage); i < end_of(action.stage); ++i) {
      const auto& layer = model_.layers[i];
      if (sharded_) units_.use(i);
      auto more = only(
          timeline::MemoryKind::working,
          use_of(i).forward_peak_bytes + arriving);
      if (i == begin_of(action.stage) && action.stage > 0) {
        more[timeline::MemoryKind::communication] += layer.input_bytes;
      }
      tally_.moment(place("forward of " + layer.name, action), more);
      keep(kept_by(i, action.stage), 1);
      add_calls(layer.forward_calls);
      if (i + 1 < end_of(action.stage)) {
        arriving = model_.layers[i + 1].input_bytes;
      } else if (action.stage + 1 < schedule_.num_stages()) {
        tally_.moment(
            place("output of " + layer.name, action),
            only(timeline::MemoryKind::communication, layer.output_bytes));
        if (schedule_.rank_of_stage[static_cast<size_t>(action.stage) + 1] !=
            options_.pipeline_rank) {
          calls_.add("send", "pp", "activations", layer.output_bytes);
        }
      }
    }
  }

  void
  run_backward(const Action& action, bool first, bool last, bool completes) {
    if (sharded_ && completes) units_.begin_round();
    for (size_t i = end_of(action.stage); i-- > begin_of(action.stage);) {
      const auto& layer = model_.layers[i];
      const auto& use = use_of(i);
      if (sharded_) units_.use(i);
      const std::string what = place("backward of " + layer.name, action);
      int64_t trained = 0;
      int64_t largest = 0;
      for (const auto& one : layer.parameters) {
        if (!one.trains) continue;
        const int64_t bytes = one.numel * model_.compute_bytes;
        trained += bytes;
        largest = std::max(largest, bytes);
      }
      timeline::MemoryByKind more;
      if (!completes || sharded_ || !first) {
        if (sharded_ && completes) units_.fill_gradients(i);
        more[timeline::MemoryKind::working] =
            use.backward_working_bytes + (completes ? largest : 0);
      } else {
        more[timeline::MemoryKind::working] =
            use.backward_peak_bytes - use.backward_peak_gradient_bytes;
        more[timeline::MemoryKind::gradients] =
            use.backward_peak_gradient_bytes;
      }
      // The activations that backward frees are part of its peak.
      tally_.moment(what, more);
      if (completes) {
        keep(kept_by(i, action.stage), -1);
        add_calls(layer.backward_calls[choices_[i]]);
        if (sharded_) {
          units_.complete_gradients(
              i, begin_of(action.stage), end_of(action.stage), last);
        } else if (first) {
          tally_.hold(timeline::MemoryKind::gradients, trained);
          plain_gradients_ += trained;
          hold_bucket(layer);
        }
      }
    }
    const size_t begin = begin_of(action.stage);
    const bool sends =
        action.stage > 0 && action.kind != ActionKind::backward_weight &&
        schedule_.rank_of_stage[static_cast<size_t>(action.stage) - 1] !=
            options_.pipeline_rank;
    if (sends) {
      calls_.add("send", "pp", "gradients", model_.layers[begin].input_bytes);
    }
  }

  // Follows TiedParameters: the other stages' gradients arrive and are summed.
  void sum_ties() {
    for (const auto& tie : model_.ties) {
      const auto own = std::ranges::count_if(
          tie.layers, [&](size_t layer) { return has(layer); });
      const auto others = static_cast<int64_t>(tie.layers.size()) - own;
      if (own == 0 || others == 0) continue;
      // Ranks of ep shard what is no expert too.
      const auto& layout = job_.layout;
      const int64_t ranks =
          layout.dp_shard > 1 ? layout.dp_shard * layout.ep : 1;
      const int64_t bytes =
          (tie.numel + ranks - 1) / ranks * model_.master_bytes;
      tally_.moment(
          "sum of tied gradients",
          only(timeline::MemoryKind::working, (others + 1) * bytes));
      calls_.add(
          "send", "pp", "gradients of tied parameters", own * others * bytes,
          own * others);
    }
  }

  // ------------------------------------------------- plain data parallelism

  // Whether several ranks sum the gradients of what plain data parallelism
  // replicates. Those of ep have different experts.
  bool is_reduced(const PlannedParameter& one) const {
    const auto& layout = job_.layout;
    const int64_t ranks =
        one.expert ? layout.data_degree() : layout.data_ranks();
    return one.trains && ranks > 1;
  }

  // Small gradients are copied together before they are reduced.
  void hold_bucket(const PlannedLayer& layer) {
    for (const auto& one : layer.parameters) {
      const int64_t bytes = one.numel * model_.master_bytes;
      if (!is_reduced(one) || bytes >= kInPlaceBytes) continue;
      tally_.hold(timeline::MemoryKind::communication, bytes);
      bucket_now_ += bytes;
    }
    while (bucket_now_ > job_.train.bucket_bytes) {
      tally_.drop(timeline::MemoryKind::communication, job_.train.bucket_bytes);
      bucket_now_ -= job_.train.bucket_bytes;
    }
  }

  void list_buckets() {
    for (const bool experts : {false, true}) list_buckets(experts);
  }

  void list_buckets(bool experts) {
    int64_t small = 0;
    for (const size_t i : layers_) {
      for (const auto& one : model_.layers[i].parameters) {
        const bool apart = job_.layout.ep > 1 && one.expert;
        if (!is_reduced(one) || apart != experts) continue;
        const int64_t bytes = one.numel * model_.master_bytes;
        if (bytes < kInPlaceBytes) {
          small += bytes;
        } else {
          calls_.add(
              "all_reduce", "dp", "gradients of " + model_.layers[i].name,
              bytes);
        }
      }
    }
    if (small == 0) return;
    constexpr int64_t kFirst = 1 << 20;
    const int64_t buckets =
        1 +
        (std::max<int64_t>(0, small - kFirst) + job_.train.bucket_bytes - 1) /
            std::max<int64_t>(1, job_.train.bucket_bytes);
    calls_.add("all_reduce", "dp", "small gradients together", small, buckets);
  }

  void add_calls(const std::vector<PlannedCalls>& calls) {
    for (const auto& one : calls) {
      calls_.add(one.operation, one.axis, one.what, one.bytes, one.count);
    }
  }

  const MemoryModel& model_;
  const Job& job_;
  const WalkOptions options_;
  const Schedule& schedule_;
  MemoryTally tally_;
  CallList calls_;
  const std::vector<size_t> choices_;
  const bool sharded_;
  PlannedUnits units_;
  std::vector<size_t> layers_;  // of this rank

  int64_t plain_gradients_ = 0;
  int64_t bucket_now_ = 0;
  RankPlan plan_;
};

}  // namespace

std::vector<size_t> recompute_choices(
    const MemoryModel& model, const MemoryOptions& options, int pipeline_rank) {
  const auto none = static_cast<size_t>(cost::Recompute::none);
  std::vector<size_t> choices(model.layers.size(), none);
  if (options.recompute == Recompute::none) return choices;
  const auto all = recompute_costs(model);
  std::vector<size_t> own;
  std::vector<cost::RecomputeCost> costs;
  for (const int32_t stage : model.schedule.stages_of(pipeline_rank)) {
    const auto at = static_cast<size_t>(stage);
    for (size_t i = model.boundaries[at]; i < model.boundaries[at + 1]; ++i) {
      if (i == all.size()) continue;  // the loss
      own.push_back(i);
      costs.push_back(all[i]);
    }
  }
  const auto stored = stored_activations(model.schedule);
  const auto chosen = cost::plan_recompute(
      options, costs,
      std::max(1, stored.ranks[static_cast<size_t>(pipeline_rank)]));
  for (size_t i = 0; i < own.size(); ++i) {
    choices[own[i]] = static_cast<size_t>(chosen[i]);
  }
  return choices;
}

RankPlan walk_step(
    const MemoryModel& model, const Job& job, const WalkOptions& options) {
  // Ranks of cp hold and reduce parameters as the data-parallel ranks do.
  Job held = job;
  auto& sharers =
      shards_state(job) ? held.layout.dp_shard : held.layout.dp_replicate;
  sharers *= std::exchange(held.layout.cp, 1);
  return StepWalk(model, held, options).run();
}

}  // namespace echelon::memory_plan::detail
