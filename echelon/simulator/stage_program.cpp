#include "echelon/simulator/stage_program.h"

#include <algorithm>

#include "echelon/cost/host_seconds.h"
#include "echelon/simulator/layer_pass.h"
#include "echelon/simulator/rank_traffic.h"

namespace echelon::simulator {
namespace {

struct Layer {
  const LayerWork* work;
  std::string name;
  int16_t gather_tag;
  int16_t reduce_tag;
};

class Builder {
 public:
  explicit Builder(const StageProgramInput& input)
      : in_(input),
        traffic_(
            input.strategy, input.cluster, input.stack, input.axes,
            input.rank) {}

  Program build() {
    for (const auto* layers : in_.stages) add_stage(*layers);
    finish();
    program_.labels = traffic_.take_labels();
    return std::move(program_);
  }

 private:
  bool shards_parameters() const { return in_.strategy.zero_stage == 3; }

  // Stages --------------------------------------------------------------------

  std::vector<Layer> layers_of(const std::vector<LayerWork>& stage) {
    std::vector<Layer> layers;
    for (const LayerWork& work : stage) {
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

  void add_stage(const std::vector<LayerWork>& stage) {
    const std::vector<Layer> layers = layers_of(stage);
    if (gathers_at_once()) {
      for (const Layer& layer : layers) {
        for (const Instruction& one :
             traffic_.gathers(elements_of(*layer.work), layer.name)) {
          launch(program_.begin, one, Stream::gather, layer.gather_tag);
        }
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
      if (gathers && gathers_at_once()) {
        wait_for_gather(list, layer);
      } else if (gathers) {
        gather_ahead(list, order, i, kind);
      }
      if (layer.work != known) {
        pass = layer_pass(pass_input_, *layer.work, kind, traffic_);
      }
      known = layer.work;
      append(list, pass);
      if (reduces) reduce_after(list, bucket, layer, i + 1 == order.size());
    }
    if (kind != ActionKind::backward_weight) {
      add_compute(
          list, Work::memory,
          action_host_seconds(
              in_.strategy, in_.stack, in_.cluster.node_of(in_.rank).device));
    }
    // Gradients that are cut in every microbatch are added to what is there.
    if (reduces && shards_parameters() && in_.stack.reduces_each_microbatch) {
      list.push_back({.kind = Instruction::Kind::wait_all});
    }
    return list;
  }

  static void
  launch(Instructions& list, Instruction one, Stream stream, int16_t tag) {
    one.kind = Instruction::Kind::launch;
    one.stream = stream;
    one.tag = tag;
    list.push_back(one);
  }

  // Layer i must be there; the next one is on its way while it runs. Without a
  // pipeline, the last layer is still there when its backward begins.
  void gather_ahead(
      Instructions& list, const std::vector<const Layer*>& order, size_t i,
      ActionKind kind) {
    const bool kept =
        kind != ActionKind::forward && in_.strategy.layout.pp == 1;
    const auto start = [&](size_t at) {
      if (at >= order.size() || (at == 0 && kept)) return;
      for (const Instruction& one :
           traffic_.gathers(elements_of(*order[at]->work), order[at]->name)) {
        if (in_.stack.overlaps_parameters) {
          launch(list, one, Stream::gather, order[at]->gather_tag);
        } else {
          list.push_back(one);
        }
      }
    };
    if (i == 0) start(0);
    if (!in_.stack.overlaps_parameters && i > 0) start(i);
    const bool here = !(i == 0 && kept);
    if (in_.stack.overlaps_parameters && here) wait_for_gather(list, *order[i]);
    if (in_.stack.overlaps_parameters) start(i + 1);
  }

  static void wait_for_gather(Instructions& list, const Layer& layer) {
    Instruction wait{.kind = Instruction::Kind::wait};
    wait.tag = layer.gather_tag;
    list.push_back(wait);
  }

  // Stages 1 and 2, after the update of the step before.
  bool gathers_at_once() const {
    return in_.strategy.zero_stage > 0 && !shards_parameters() &&
           in_.stack.overlaps_parameters && in_.stack.gathers_at_once;
  }

  void reduce_after(
      Instructions& list, Elements& bucket, const Layer& layer, bool is_last) {
    bucket += elements_of(*layer.work);
    const double bytes =
        (bucket.dense + bucket.experts) * in_.stack.gradient_bytes;
    const bool waits =
        in_.strategy.zero_stage == 0 && bytes < in_.stack.bucket_bytes;
    if (waits && !is_last) return;
    for (const Instruction& one : traffic_.reductions(bucket, layer.name)) {
      if (in_.stack.overlaps_gradients) {
        launch(list, one, Stream::reduce, layer.reduce_tag);
      } else {
        list.push_back(one);
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
        const Elements own = elements_of(layer);
        all += {repeat * own.dense, repeat * own.experts};
      }
    }
    if (!shards_parameters() && !in_.stack.overlaps_gradients) {
      append(list, traffic_.reductions(all, "gradients"));
    }
    for (Instruction one : traffic_.collective(
             CollectiveKind::all_reduce, mask_of(Axis::pp), in_.tied_bytes,
             "tied embedding")) {
      one.collective_seconds = in_.after.tied;  // of the two ends alone
      one.meets = !in_.stack.validates_afterwards;
      list.push_back(one);
    }
    add_compute(list, Work::other, in_.after.other);
    add_compute(list, Work::optimizer, in_.after.optimizer);
    const bool gathers_now = in_.strategy.zero_stage > 0 &&
                             !shards_parameters() &&
                             !in_.stack.overlaps_parameters;
    if (gathers_now) append(list, traffic_.gathers(all, "parameters"));
  }

  const StageProgramInput& in_;
  const LayerPassInput pass_input_{
      in_.strategy, in_.cluster, in_.stack, in_.rank};
  RankTraffic traffic_;
  Program program_;
};

}  // namespace

Program make_program(const StageProgramInput& input) {
  return Builder(input).build();
}

}  // namespace echelon::simulator
