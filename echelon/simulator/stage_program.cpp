#include "echelon/simulator/stage_program.h"

#include <algorithm>
#include <cmath>

#include "echelon/cost/operation_time.h"

namespace echelon::simulator {
namespace {

// Who sums or cuts the parameters: of layers, and of experts, whose copies are not
// spread along ep.
struct Sharing {
  AxisMask shards = 0;  // who cuts them: ZeRO
  AxisMask copies = 0;  // who else sums their gradients
};

AxisMask only_split(AxisMask axes, const Layout& layout) {
  for (const Axis axis : kAxes) {
    if (layout.degree(axis) == 1) axes &= static_cast<AxisMask>(~mask_of(axis));
  }
  return axes;
}

Sharing sharing_of(const Strategy& strategy, bool experts) {
  AxisMask cut = mask_of(Axis::dp_shard) | mask_of(Axis::cp);
  if (!experts) cut |= mask_of(Axis::ep);
  const AxisMask copies = mask_of(Axis::dp_replicate);
  const Layout& layout = strategy.layout;
  if (strategy.zero_stage == 0) {
    return {0, only_split(cut | copies, layout)};
  }
  return {only_split(cut, layout), only_split(copies, layout)};
}

double parameter_bytes(const Strategy& strategy) {
  switch (strategy.precision) {
    case Precision::fp64: return 8;
    case Precision::fp32:
    case Precision::tf32: return 4;
    default: return 2;
  }
}

GroupPlace place_of_mask(const StageProgramInput& in, AxisMask axes) {
  return place_of(in.strategy, in.cluster, axes_of(axes), in.rank);
}

void add_axes(std::vector<AxisMask>& all, AxisMask axes) {
  if (axes == 0 || std::find(all.begin(), all.end(), axes) != all.end()) return;
  all.push_back(axes);
}

class Builder {
 public:
  explicit Builder(const StageProgramInput& input)
      : in_(input), node_(input.cluster.node_of(input.rank)) {}

  Program build() {
    for (size_t stage = 0; stage < in_.stages.size(); ++stage) add_stage(stage);
    finish();
    return std::move(program_);
  }

 private:
  // Collectives ---------------------------------------------------------------

  int32_t label(const std::string& text) {
    const auto at =
        std::find(program_.labels.begin(), program_.labels.end(), text);
    if (at == program_.labels.end()) program_.labels.push_back(text);
    return static_cast<int32_t>(
        std::find(program_.labels.begin(), program_.labels.end(), text) -
        program_.labels.begin());
  }

  // With no other rank in the group there is none.
  Instruction collective(
      CollectiveKind kind, AxisMask axes, double bytes, const std::string& name) {
    Instruction one{.kind = Instruction::Kind::collective, .collective = kind};
    const auto at = std::find(in_.axes.begin(), in_.axes.end(), axes);
    if (axes == 0 || at == in_.axes.end() || bytes <= 0) return one;
    one.group = static_cast<int16_t>(at - in_.axes.begin());
    one.bytes = bytes;
    one.label = label(name);
    one.collective_seconds = collective_seconds(
        kind, bytes, place_of_mask(in_, axes), node_, in_.cluster, in_.stack);
    return one;
  }

  void add(Instructions& list, const Instruction& one) {
    if (one.group >= 0) list.push_back(one);
  }

  void launch(
      Instructions& list, Instruction one, Stream stream, int16_t tag) {
    if (one.group < 0) return;
    one.kind = Instruction::Kind::launch;
    one.stream = stream;
    one.tag = tag;
    list.push_back(one);
  }

  int16_t new_tag() { return program_.num_tags++; }

  // Layers --------------------------------------------------------------------

  void add_operations(
      Instructions& list, const std::string& layer, const Operations& operations,
      bool again) {
    for (const Operation& operation : operations) {
      const double seconds = operation_seconds(
          operation, in_.strategy, in_.cluster, in_.rank);
      const Work work = again ? Work::recompute
                        : operation.kind == OperationKind::memory ||
                                operation.kind == OperationKind::collective
                            ? Work::memory
                            : Work::matrix;
      if (operation.kind != OperationKind::collective) {
        add_compute(list, work, seconds);
        continue;
      }
      Instruction one = collective(
          operation.collective, mask_of(operation.axis), operation.bytes,
          layer + " " + operation.name);
      one.collective_seconds = seconds * (1 - operation.hideable);
      add(list, one);
      add_compute(
          list, work, seconds * operation.hideable * in_.stack.overlap_slowdown);
    }
    const PassSeconds pass = pass_seconds(
        operations, in_.strategy, in_.cluster, in_.stack, in_.rank);
    add_compute(list, again ? Work::recompute : Work::memory, pass.host);
  }

  Instructions pass_of(const LayerWork& layer, ActionKind kind) {
    Instructions list;
    const bool inputs = kind == ActionKind::backward ||
                        kind == ActionKind::backward_input;
    const bool weights = kind == ActionKind::backward ||
                         kind == ActionKind::backward_weight;
    if (kind == ActionKind::forward) add_operations(list, layer.name, layer.forward, false);
    if (inputs) {
      add_operations(list, layer.name, layer.again, true);
      add_operations(list, layer.name, layer.backward_input, false);
    }
    if (weights) add_operations(list, layer.name, layer.backward_weight, false);
    return list;
  }

  // Parameters and gradients --------------------------------------------------

  struct Elements {
    double dense = 0;
    double experts = 0;
  };

  static Elements elements_of(const LayerWork& layer) {
    return {layer.parameters - layer.expert_parameters, layer.expert_parameters};
  }

  std::vector<Instruction> gathers(
      const Elements& elements, const std::string& name) {
    std::vector<Instruction> list;
    for (const bool experts : {false, true}) {
      add(list,
          collective(
              CollectiveKind::all_gather, sharing_of(in_.strategy, experts).shards,
              (experts ? elements.experts : elements.dense) *
                  parameter_bytes(in_.strategy),
              "gather " + name + (experts ? " experts" : "")));
    }
    return list;
  }

  // Buckets of equal size that follow each other are one instruction.
  std::vector<Instruction> reductions(
      const Elements& elements, const std::string& name) {
    std::vector<Instruction> list;
    for (const bool experts : {false, true}) {
      const double bytes = (experts ? elements.experts : elements.dense) *
                           in_.stack.gradient_bytes;
      if (bytes <= 0) continue;
      const double buckets =
          in_.stack.bucket_bytes > 0
              ? std::max(1.0, std::round(bytes / in_.stack.bucket_bytes))
              : 1;
      const Sharing sharing = sharing_of(in_.strategy, experts);
      const double shards = static_cast<double>(
          std::max<int64_t>(1, place_of_mask(in_, sharing.shards).ranks));
      const std::string of = name + (experts ? " experts" : "");
      const std::string copies = sharing.shards
                                     ? "replicate " + of
                                     : "bucket " + std::to_string(next_bucket_++);
      for (Instruction one :
           {collective(
                CollectiveKind::reduce_scatter, sharing.shards, bytes / buckets,
                "reduce " + of),
            collective(
                CollectiveKind::all_reduce, sharing.copies,
                bytes / buckets / shards, copies)}) {
        one.collective_seconds *= buckets;
        one.bytes *= buckets;
        add(list, one);
      }
    }
    return list;
  }

  // Stages --------------------------------------------------------------------

  struct Layer {
    const LayerWork* work;
    std::string name;
    int16_t gather_tag;
    int16_t reduce_tag;
  };

  bool shards_parameters() const { return in_.strategy.zero_stage == 3; }

  void add_stage(size_t stage) {
    std::vector<Layer> layers;
    for (const LayerWork& work : *in_.stages[stage]) {
      for (int64_t i = 0; i < work.repeat; ++i) {
        const std::string name =
            work.repeat > 1 ? work.name + " " + std::to_string(layers.size())
                            : work.name;
        layers.push_back({&work, name, new_tag(), new_tag()});
      }
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
    if (same.number() != position.number()) return own[same.number()];
    program_.passes.push_back(make_pass(layers, kind, position));
    return static_cast<int32_t>(program_.passes.size()) - 1;
  }

  bool first_differs(ActionKind kind) const {
    return kind == ActionKind::forward && in_.strategy.zero_stage > 0 &&
           (!shards_parameters() || in_.strategy.gather_once);
  }

  bool last_differs(ActionKind kind) const {
    return kind == ActionKind::backward || kind == ActionKind::backward_weight;
  }

  bool gathers_in(ActionKind kind, Position position) const {
    if (!shards_parameters()) {
      return first_differs(kind) && position.first &&
             in_.stack.overlaps_parameters;
    }
    if (kind == ActionKind::backward_weight) return false;
    if (in_.strategy.gather_once) {
      return kind == ActionKind::forward && position.first;
    }
    return true;
  }

  bool reduces_in(ActionKind kind, Position position) const {
    if (!last_differs(kind)) return false;
    if (shards_parameters() && in_.stack.reduces_each_microbatch) return true;
    return position.last &&
           (shards_parameters() || in_.stack.overlaps_gradients);
  }

  Instructions make_pass(
      const std::vector<Layer>& layers, ActionKind kind, Position position) {
    Instructions list;
    const bool gathers = gathers_in(kind, position);
    const bool reduces = reduces_in(kind, position);
    std::vector<const Layer*> order;
    for (const Layer& layer : layers) order.push_back(&layer);
    if (kind != ActionKind::forward) std::reverse(order.begin(), order.end());
    const LayerWork* known = nullptr;
    Instructions pass;
    Elements bucket;
    for (size_t i = 0; i < order.size(); ++i) {
      const Layer& layer = *order[i];
      if (gathers) gather_ahead(list, order, i, kind);
      if (layer.work != known) pass = pass_of(*layer.work, kind);
      known = layer.work;
      append(list, pass);
      if (reduces) reduce_after(list, bucket, layer, i + 1 == order.size());
    }
    return list;
  }

  static void append(Instructions& list, const Instructions& more) {
    for (const Instruction& one : more) {
      const bool merges = one.kind == Instruction::Kind::compute &&
                          !list.empty() &&
                          list.back().kind == Instruction::Kind::compute;
      if (!merges) {
        list.push_back(one);
        continue;
      }
      Instruction& last = list.back();
      for (size_t work = 0; work < kNumWorks; ++work) {
        last.seconds[work] += one.seconds[work];
      }
      last.spread_seconds = std::hypot(last.spread_seconds, one.spread_seconds);
    }
  }

  // Layer i must be there; the next one is on its way while it runs. Without a
  // pipeline, the last layer is still there when its backward begins.
  void gather_ahead(
      Instructions& list, const std::vector<const Layer*>& order, size_t i,
      ActionKind kind) {
    const bool kept = kind != ActionKind::forward && in_.strategy.layout.pp == 1;
    const auto start = [&](size_t at) {
      if (at >= order.size() || (at == 0 && kept)) return;
      for (const Instruction& one :
           gathers(elements_of(*order[at]->work), order[at]->name)) {
        if (in_.stack.overlaps_parameters) {
          launch(list, one, Stream::gather, order[at]->gather_tag);
        } else {
          add(list, one);
        }
      }
    };
    if (i == 0) start(0);
    if (!in_.stack.overlaps_parameters && i > 0) start(i);
    const bool here = !(i == 0 && kept);
    if (in_.stack.overlaps_parameters && here) {
      Instruction wait{.kind = Instruction::Kind::wait};
      wait.tag = order[i]->gather_tag;
      list.push_back(wait);
    }
    if (in_.stack.overlaps_parameters) start(i + 1);
  }

  void reduce_after(
      Instructions& list, Elements& bucket, const Layer& layer, bool is_last) {
    const Elements own = elements_of(*layer.work);
    bucket.dense += own.dense;
    bucket.experts += own.experts;
    const double bytes =
        (bucket.dense + bucket.experts) * in_.stack.gradient_bytes;
    if (!shards_parameters() && !is_last && bytes < in_.stack.bucket_bytes) return;
    for (const Instruction& one : reductions(bucket, layer.name)) {
      if (in_.stack.overlaps_gradients) {
        launch(list, one, Stream::reduce, layer.reduce_tag);
      } else {
        add(list, one);
      }
    }
    bucket = {};
  }

  // After the last action -----------------------------------------------------

  void finish() {
    Instructions& list = program_.finish;
    list.push_back({.kind = Instruction::Kind::wait_all});
    Elements all;
    for (const auto* layers : in_.stages) {
      for (const LayerWork& layer : *layers) {
        const double repeat = static_cast<double>(layer.repeat);
        all.dense += repeat * elements_of(layer).dense;
        all.experts += repeat * elements_of(layer).experts;
      }
    }
    if (!shards_parameters() && !in_.stack.overlaps_gradients) {
      for (const Instruction& one : reductions(all, "gradients")) add(list, one);
    }
    add_compute(list, Work::other, in_.after.other);
    add_compute(list, Work::optimizer, in_.after.optimizer);
    const bool gathers_now = in_.strategy.zero_stage > 0 &&
                             !shards_parameters() &&
                             !in_.stack.overlaps_parameters;
    if (!gathers_now) return;
    for (const Instruction& one : gathers(all, "parameters")) add(list, one);
  }

  const StageProgramInput& in_;
  const Node& node_;
  int next_bucket_ = 0;
  Program program_;
};

}  // namespace

std::vector<AxisMask> launched_axes(const Strategy& strategy) {
  std::vector<AxisMask> all;
  for (const bool experts : {false, true}) {
    const Sharing sharing = sharing_of(strategy, experts);
    add_axes(all, sharing.shards);
    add_axes(all, sharing.copies);
  }
  return all;
}

std::vector<AxisMask> traffic_axes(const Strategy& strategy) {
  std::vector<AxisMask> all = launched_axes(strategy);
  for (const Axis axis : {Axis::tp, Axis::cp, Axis::ep}) {
    add_axes(all, only_split(mask_of(axis), strategy.layout));
  }
  return all;
}

Axis reported_axis(AxisMask axes, const Layout& layout) {
  for (const Axis axis :
       {Axis::dp_shard, Axis::dp_replicate, Axis::cp, Axis::ep, Axis::tp}) {
    if ((axes & mask_of(axis)) && layout.degree(axis) > 1) return axis;
  }
  return Axis::tp;
}

Program make_program(const StageProgramInput& input) {
  return Builder(input).build();
}

}  // namespace echelon::simulator
