// Writes the program of one rank class: for each stage and kind of action a
// pass, which is a list of instructions. The operations of a layer
// (cost/operation.h) become computing and blocking collectives; around them
// come the all-gathers and reductions that ZeRO stage and framework ask for,
// each launched on its stream where the framework overlaps it. A pass depends
// on its position in the step, since parameters may be unsharded in the first
// forward alone, and gradients summed in the last backward alone; positions
// that make no difference share one pass. The host's time, and the slowdown by
// a hidden collective, are added as computing.
#include "echelon/simulator/stage_program.h"

#include <algorithm>
#include <span>

#include "echelon/cost/collective_time.h"
#include "echelon/cost/memory_estimate.h"
#include "echelon/cost/operation_time.h"

namespace echelon::simulator {
namespace {

AxisMask only_split(AxisMask axes, const Layout& layout) {
  for (const Axis axis : kAxes) {
    if (layout.degree(axis) == 1) axes &= static_cast<AxisMask>(~mask_of(axis));
  }
  return axes;
}

void add_axes(std::vector<AxisMask>& all, AxisMask axes) {
  if (axes == 0 || std::ranges::find(all, axes) != all.end()) return;
  all.push_back(axes);
}

// sharing_axes() (cost/memory_estimate.h) as masks, without axes of degree 1.
struct Sharing {
  AxisMask shards = 0;
  AxisMask copies = 0;
};

Sharing sharing_of(const cost::Strategy& strategy, bool experts) {
  const cost::SharingAxes axes = cost::sharing_axes(
      strategy, cost::find_framework(strategy.framework), experts);
  const auto split = [&](std::span<const Axis> list) {
    AxisMask mask = 0;
    for (const Axis axis : list) mask |= mask_of(axis);
    return only_split(mask, strategy.layout);
  };
  return {split(axes.shards), split(axes.copies)};
}

// The collectives of one rank as instructions: along which group, how long, how
// many bytes. They are those of its layers' operations, its parameters and its
// gradients.
class RankTraffic {
 public:
  explicit RankTraffic(const StageProgramInput& input) : in_(input) {}

  // Makes one collective; the list is empty when no other rank is in the group.
  Instructions collective(
      cost::CollectiveKind kind, AxisMask axes, double bytes,
      const std::string& name) {
    const auto at = std::ranges::find(in_.axes, axes);
    if (axes == 0 || at == in_.axes.end() || bytes <= 0) return {};
    Instruction one{.kind = Instruction::Kind::collective, .collective = kind};
    one.group = static_cast<int16_t>(at - in_.axes.begin());
    one.bytes = bytes;
    one.label = label(name);
    one.collective_seconds = cost::collective_seconds(
        kind, bytes, place(axes), in_.cluster.node_of(in_.rank), in_.cluster,
        in_.framework);
    return {one};
  }

  // Makes the all-gathers of parameters that ZeRO shards.
  Instructions
  gathers(const cost::Elements& elements, const std::string& name) {
    Instructions list;
    for (const bool experts : {false, true}) {
      const double bytes = (experts ? elements.experts : elements.dense) *
                           cost::element_bytes(in_.strategy.precision);
      append(
          list, collective(
                    cost::CollectiveKind::all_gather,
                    sharing_of(in_.strategy, experts).shards, bytes,
                    "gather " + name + (experts ? " experts" : "")));
    }
    return list;
  }

  // Reductions of gradients.
  Instructions
  reductions(const cost::Elements& elements, const std::string& name) {
    Instructions list;
    for (const bool experts : {false, true}) {
      const double bytes = (experts ? elements.experts : elements.dense) *
                           cost::reduced_bytes(in_.strategy, in_.framework);
      if (bytes <= 0) continue;
      append(
          list,
          reductions_of(bytes, experts, name + (experts ? " experts" : "")));
    }
    return list;
  }

  // The texts that Instruction::label is an index into.
  std::vector<std::string> take_labels() { return std::move(labels_); }

 private:
  cost::GroupPlace place(AxisMask axes) const {
    return cost::place_of(in_.strategy, in_.cluster, axes_of(axes), in_.rank);
  }

  int32_t label(const std::string& text) {
    const auto at = std::ranges::find(labels_, text);
    const auto number = static_cast<int32_t>(at - labels_.begin());
    if (at == labels_.end()) labels_.push_back(text);
    return number;
  }

  Instructions
  reductions_of(double bytes, bool experts, const std::string& name) {
    const Sharing sharing = sharing_of(in_.strategy, experts);
    const auto shards =
        static_cast<double>(std::max<int64_t>(1, place(sharing.shards).ranks));
    const std::string copies = sharing.shards
                                   ? "replicate " + name
                                   : "bucket " + std::to_string(next_bucket_++);
    Instructions list = collective(
        cost::CollectiveKind::reduce_scatter, sharing.shards, bytes,
        "reduce " + name);
    append(
        list, collective(
                  cost::CollectiveKind::all_reduce, sharing.copies,
                  bytes / shards, copies));
    return list;
  }

  const StageProgramInput& in_;
  int next_bucket_ = 0;
  std::vector<std::string> labels_;
};

// One pass through one layer, with its own collectives (tp, cp, ep) but not
// those of its parameters and gradients.
class LayerPass {
 public:
  LayerPass(
      const StageProgramInput& input, const cost::LayerWork& layer,
      RankTraffic& traffic)
      : in_(input), layer_(layer), traffic_(traffic) {}

  Instructions instructions(ActionKind kind) && {
    const bool inputs =
        kind == ActionKind::backward || kind == ActionKind::backward_input;
    const bool weights =
        kind == ActionKind::backward || kind == ActionKind::backward_weight;
    if (kind == ActionKind::forward) add(layer_.forward, false);
    if (inputs) {
      add(layer_.again, true);
      add(layer_.backward_input, false);
    }
    if (weights) add(layer_.backward_weight, false);
    return std::move(list_);
  }

 private:
  void add(const cost::Operations& operations, bool again) {
    for (const cost::Operation& operation : operations) {
      if (operation.kind == cost::OperationKind::collective) {
        add_collective(operation, again);
      } else {
        add_compute(list_, work_of(operation, again), seconds_of(operation));
      }
    }
    const cost::PassSeconds pass = cost::pass_seconds(
        operations, in_.strategy, in_.cluster, in_.framework, in_.rank);
    add_compute(list_, again ? Work::recompute : Work::memory, pass.host);
  }

  double seconds_of(const cost::Operation& operation) const {
    return cost::operation_seconds(
        operation, in_.strategy, in_.cluster, in_.rank);
  }

  static Work work_of(const cost::Operation& operation, bool again) {
    if (again) return Work::recompute;
    const bool moves = operation.kind == cost::OperationKind::memory ||
                       operation.kind == cost::OperationKind::collective;
    return moves ? Work::memory : Work::matrix;
  }

  // The part that computation hides slows it down.
  void add_collective(const cost::Operation& operation, bool again) {
    const double seconds = seconds_of(operation);
    const double hidden =
        cost::hidden_seconds(operation, in_.strategy, in_.cluster, in_.rank);
    for (Instruction one : traffic_.collective(
             operation.collective, mask_of(operation.axis),
             operation.times * operation.bytes,
             layer_.name + " " + operation.name)) {
      one.collective_seconds = seconds - hidden;
      list_.push_back(one);
    }
    add_compute(
        list_, work_of(operation, again),
        hidden * in_.framework.overlap_slowdown);
  }

  const StageProgramInput& in_;
  const cost::LayerWork& layer_;
  RankTraffic& traffic_;
  Instructions list_;
};

struct Layer {
  const cost::LayerWork* work;
  std::string name;
  int16_t gather_tag;
  int16_t reduce_tag;
};

class Builder {
 public:
  explicit Builder(const StageProgramInput& input)
      : in_(input),
        reduces_often_(
            cost::gradients_are_reduced_often(input.strategy, input.framework)),
        traffic_(input) {}

  Program build() {
    for (const auto* layers : in_.stages) add_stage(*layers);
    finish();
    program_.labels = traffic_.take_labels();
    return std::move(program_);
  }

 private:
  bool shards_parameters() const { return in_.strategy.zero_stage == 3; }

  // Stages --------------------------------------------------------------------

  std::vector<Layer> layers_of(const std::vector<cost::LayerWork>& stage) {
    std::vector<Layer> layers;
    for (const cost::LayerWork& work : stage) {
      for (int64_t i = 0; i < work.repeat; ++i) {
        const std::string name =
            work.repeat > 1 ? work.name + " " + std::to_string(layers.size())
                            : work.name;
        const int16_t gather_tag = program_.num_tags++;
        const int16_t reduce_tag = program_.num_tags++;
        layers.push_back({&work, name, gather_tag, reduce_tag});
      }
    }
    return layers;
  }

  void add_stage(const std::vector<cost::LayerWork>& stage) {
    const std::vector<Layer> layers = layers_of(stage);
    if (gathers_at_once()) {
      for (const Layer& layer : layers) gather(program_.begin, layer);
    }
    StageProgram program;
    program.forward_bytes = layers.back().work->output_bytes;
    for (const ActionKind kind :
         {ActionKind::forward, ActionKind::backward, ActionKind::backward_input,
          ActionKind::backward_weight}) {
      for (const bool last : {false, true}) {
        for (const bool first : {false, true}) {
          const Position position{first, last};
          program.pass[static_cast<size_t>(kind)][position.number()] =
              pass_number(layers, kind, position, program);
        }
      }
    }
    program_.stages.push_back(program);
  }

  // Positions that make no difference share a pass.
  int32_t pass_number(
      const std::vector<Layer>& layers, ActionKind kind, Position position,
      const StageProgram& so_far) {
    const auto& own = so_far.pass[static_cast<size_t>(kind)];
    const bool first = position.first && first_differs(kind);
    const bool last = position.last && last_differs(kind);
    const Position same{first, last};
    // add_stage() visits false before true, so that pass is there already.
    if (same.number() != position.number()) return own[same.number()];
    program_.passes.push_back(make_pass(layers, kind, position));
    return static_cast<int32_t>(program_.passes.size()) - 1;
  }

  bool first_differs(ActionKind kind) const {
    return kind == ActionKind::forward && in_.strategy.zero_stage > 0 &&
           (!shards_parameters() || in_.strategy.unshard_once);
  }

  bool last_differs(ActionKind kind) const {
    return kind == ActionKind::backward || kind == ActionKind::backward_weight;
  }

  bool gathers_in(ActionKind kind, Position position) const {
    if (!shards_parameters()) {
      return first_differs(kind) && position.first &&
             in_.framework.overlaps_parameters;
    }
    if (kind == ActionKind::backward_weight) return false;
    if (in_.strategy.unshard_once) {
      return kind == ActionKind::forward && position.first;
    }
    return true;
  }

  bool reduces_in(ActionKind kind, Position position) const {
    if (!last_differs(kind)) return false;
    if (reduces_often_) return true;
    return position.last &&
           (shards_parameters() || in_.framework.overlaps_gradients);
  }

  Instructions make_pass(
      const std::vector<Layer>& layers, ActionKind kind, Position position) {
    Instructions list;
    const bool gathers = gathers_in(kind, position);
    const bool reduces = reduces_in(kind, position);
    std::vector<const Layer*> order;
    for (const Layer& layer : layers) order.push_back(&layer);
    if (kind != ActionKind::forward) std::ranges::reverse(order);
    const cost::LayerWork* known = nullptr;
    Instructions pass;
    cost::Elements bucket;
    const bool drains = reduces && reduces_often_;
    // The reductions of the microbatch before may last until here.
    if (drains && in_.framework.reduces_until_backward) {
      list.push_back({.kind = Instruction::Kind::wait_all});
    }
    for (size_t i = 0; i < order.size(); ++i) {
      const Layer& layer = *order[i];
      if (gathers && gathers_at_once()) {
        wait_for_gather(list, layer);
      } else if (gathers) {
        gather_ahead(list, order, i, kind);
      }
      if (layer.work != known) {
        pass = LayerPass(in_, *layer.work, traffic_).instructions(kind);
      }
      known = layer.work;
      append(list, pass);
      if (reduces) reduce_after(list, bucket, layer, i + 1 == order.size());
    }
    // Gradients that are sharded in every microbatch accumulate.
    if (drains && !in_.framework.reduces_until_backward) {
      list.push_back({.kind = Instruction::Kind::wait_all});
    }
    return list;
  }

  // Appends collectives: blocking, or launched.
  static void
  add(Instructions& list, const Instructions& collectives, bool launches,
      Stream stream, int16_t tag) {
    for (Instruction one : collectives) {
      if (launches) {
        one.kind = Instruction::Kind::launch;
        one.stream = stream;
        one.tag = tag;
      }
      list.push_back(one);
    }
  }

  void gather(Instructions& list, const Layer& layer) {
    add(list, traffic_.gathers(cost::elements_of(*layer.work), layer.name),
        in_.framework.overlaps_parameters, Stream::gather, layer.gather_tag);
  }

  // Layer i must be unsharded; the next one is prefetched while it runs.
  // Without a pipeline, the last layer is still unsharded when its backward
  // begins.
  void gather_ahead(
      Instructions& list, const std::vector<const Layer*>& order, size_t i,
      ActionKind kind) {
    const bool kept =
        kind != ActionKind::forward && in_.strategy.layout.pp == 1;
    const auto start = [&](size_t at) {
      if (at < order.size() && !(at == 0 && kept)) gather(list, *order[at]);
    };
    if (i == 0) start(0);
    if (!in_.framework.overlaps_parameters && i > 0) start(i);
    const bool here = !(i == 0 && kept);
    if (in_.framework.overlaps_parameters && here)
      wait_for_gather(list, *order[i]);
    if (in_.framework.overlaps_parameters) start(i + 1);
  }

  static void wait_for_gather(Instructions& list, const Layer& layer) {
    Instruction wait{.kind = Instruction::Kind::wait};
    wait.tag = layer.gather_tag;
    list.push_back(wait);
  }

  // Stages 1 and 2, after the update of the previous step.
  bool gathers_at_once() const {
    return in_.strategy.zero_stage > 0 && !shards_parameters() &&
           in_.framework.overlaps_parameters && in_.framework.gathers_at_once;
  }

  void reduce_after(
      Instructions& list, cost::Elements& bucket, const Layer& layer,
      bool is_last) {
    bucket += cost::elements_of(*layer.work);
    const double bytes = (bucket.dense + bucket.experts) *
                         cost::reduced_bytes(in_.strategy, in_.framework);
    const bool waits =
        in_.strategy.zero_stage == 0 && bytes < in_.framework.bucket_bytes;
    if (waits && !is_last) return;
    add(list, traffic_.reductions(bucket, layer.name),
        in_.framework.overlaps_gradients, Stream::reduce, layer.reduce_tag);
    bucket = {};
  }

  // After the last action -----------------------------------------------------

  void finish() {
    Instructions& list = program_.finish;
    list.push_back({.kind = Instruction::Kind::wait_all});
    cost::Elements all;
    for (const auto* layers : in_.stages) {
      for (const cost::LayerWork& layer : *layers) {
        const double repeat = static_cast<double>(layer.repeat);
        const cost::Elements own = cost::elements_of(layer);
        all += {repeat * own.dense, repeat * own.experts};
      }
    }
    if (!shards_parameters() && !in_.framework.overlaps_gradients &&
        !reduces_often_) {
      append(list, traffic_.reductions(all, "gradients"));
    }
    for (Instruction one : traffic_.collective(
             cost::CollectiveKind::all_reduce, mask_of(Axis::pp),
             in_.tied_bytes, "tied embedding")) {
      one.collective_seconds = in_.after.tied;  // of the two ends alone
      one.meets = !in_.framework.validates_afterwards;
      list.push_back(one);
    }
    add_compute(list, Work::other, in_.after.other);
    add_compute(list, Work::optimizer, in_.after.optimizer);
    const bool gathers_now = in_.strategy.zero_stage > 0 &&
                             !shards_parameters() &&
                             !in_.framework.overlaps_parameters;
    if (gathers_now) append(list, traffic_.gathers(all, "parameters"));
  }

  const StageProgramInput& in_;
  const bool reduces_often_;
  RankTraffic traffic_;
  Program program_;
};

}  // namespace

std::vector<AxisMask> launched_axes(const cost::Strategy& strategy) {
  std::vector<AxisMask> all;
  for (const bool experts : {false, true}) {
    const Sharing sharing = sharing_of(strategy, experts);
    add_axes(all, sharing.shards);
    add_axes(all, sharing.copies);
  }
  return all;
}

std::vector<AxisMask> traffic_axes(const cost::Strategy& strategy, bool tied) {
  std::vector<AxisMask> all = launched_axes(strategy);
  for (const Axis axis : {Axis::tp, Axis::cp, Axis::ep}) {
    add_axes(all, only_split(mask_of(axis), strategy.layout));
  }
  if (tied) add_axes(all, mask_of(Axis::pp));
  return all;
}

Program make_program(const StageProgramInput& input) {
  return Builder(input).build();
}

}  // namespace echelon::simulator
