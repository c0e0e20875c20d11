#include "echelon/simulator/layer_pass.h"

#include "echelon/cost/operation_time.h"

namespace echelon::simulator {
namespace {

class PassBuilder {
 public:
  PassBuilder(
      const LayerPassInput& input, const LayerWork& layer, RankTraffic& traffic)
      : in_(input), layer_(layer), traffic_(traffic) {}

  void add(const Operations& operations, bool again) {
    for (const Operation& operation : operations) {
      if (operation.kind == OperationKind::collective) {
        add_collective(operation, again);
      } else {
        add_compute(list_, work_of(operation, again), seconds_of(operation));
      }
    }
    const PassSeconds pass = pass_seconds(
        operations, in_.strategy, in_.cluster, in_.stack, in_.rank);
    add_compute(list_, again ? Work::recompute : Work::memory, pass.host);
  }

  Instructions take() { return std::move(list_); }

 private:
  double seconds_of(const Operation& operation) const {
    return operation_seconds(operation, in_.strategy, in_.cluster, in_.rank);
  }

  static Work work_of(const Operation& operation, bool again) {
    if (again) return Work::recompute;
    const bool moves = operation.kind == OperationKind::memory ||
                       operation.kind == OperationKind::collective;
    return moves ? Work::memory : Work::matrix;
  }

  // The part that computing hides takes some of the device.
  void add_collective(const Operation& operation, bool again) {
    const double seconds = seconds_of(operation);
    for (Instruction one : traffic_.collective(
             operation.collective, mask_of(operation.axis), operation.bytes,
             layer_.name + " " + operation.name)) {
      one.collective_seconds = seconds * (1 - operation.hideable);
      list_.push_back(one);
    }
    add_compute(
        list_, work_of(operation, again),
        seconds * operation.hideable * in_.stack.overlap_slowdown);
  }

  const LayerPassInput& in_;
  const LayerWork& layer_;
  RankTraffic& traffic_;
  Instructions list_;
};

}  // namespace

Instructions layer_pass(
    const LayerPassInput& input, const LayerWork& layer, ActionKind kind,
    RankTraffic& traffic) {
  PassBuilder pass(input, layer, traffic);
  const bool inputs =
      kind == ActionKind::backward || kind == ActionKind::backward_input;
  const bool weights =
      kind == ActionKind::backward || kind == ActionKind::backward_weight;
  if (kind == ActionKind::forward) pass.add(layer.forward, false);
  if (inputs) {
    pass.add(layer.again, true);
    pass.add(layer.backward_input, false);
  }
  if (weights) pass.add(layer.backward_weight, false);
  return pass.take();
}

}  // namespace echelon::simulator
