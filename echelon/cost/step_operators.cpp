#include "echelon/cost/step_operators.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <tuple>

#include "echelon/cost/device_rates.h"
#include "echelon/cost/layer_work.h"
#include "echelon/cost/operation_time.h"
#include "echelon/cost/step_estimate.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::cost {
namespace {

std::string shape_of(const Operation& operation) {
  if (operation.kind != OperationKind::matrix) {
    return format_bytes(operation.bytes);
  }
  const std::string many =
      operation.count > 1 ? format("{}x", operation.count) : "";
  if (is_attention(operation)) {
    return format(
        "{}[{},{}] of {}", many, operation.m, operation.n, operation.k);
  }
  return format(
      "{}[{},{}]x[{},{}]", many, operation.m, operation.k, operation.k,
      operation.n);
}

/// Of one rank of the pipeline.
class Collector {
 public:
  Collector(
      const Strategy& strategy, const cluster::Cluster& cluster, int64_t rank)
      : strategy_(strategy),
        cluster_(cluster),
        device_(cluster.node_of(rank).device),
        framework_(framework_on(find_framework(strategy.framework), device_)),
        rank_(rank) {}

  void add(const LayerWork& layer) {
    const double times =
        as_double(layer.repeat) * as_double(strategy_.num_microbatches());
    add(layer.forward, times, false);
    add(layer.again, times, true);
    add(layer.backward_input, times, true);
    add(layer.backward_weight, times, true);
  }

  StepOperators take() {
    for (auto& [key, one] : found_) {
      all_.seconds += one.seconds;
      all_.operators.push_back(std::move(one));
    }
    std::ranges::stable_sort(
        all_.operators, std::ranges::greater(), &StepOperator::seconds);
    return std::move(all_);
  }

 private:
  void add(const Operations& pass, double times, bool backward) {
    for (const Operation& operation : pass) add(operation, times, backward);
    all_.waits +=
        times * pass_seconds(pass, strategy_, cluster_, framework_, rank_).host;
    if (steps_are_graphs(strategy_, cluster_, framework_)) return;
    all_.launch_seconds += times * launch_seconds(pass, device_, framework_);
  }

  void add(const Operation& operation, double times, bool backward) {
    const double calls = times * operation.times;
    if (operation.counted && operation.launches == 0) {
      all_.views += calls;
      return;
    }
    all_.kernels += calls * as_double(operation.launches);
    const double seconds =
        operation_seconds(operation, strategy_, cluster_, rank_);
    StepOperator& one = found_[{operation.name, shape_of(operation), backward}];
    one.name = operation.name;
    one.shape = shape_of(operation);
    one.backward = backward;
    one.bound = bound_of(operation, seconds / operation.times);
    one.calls += calls;
    one.seconds += times * seconds;
  }

  Bound bound_of(const Operation& operation, double seconds) const {
    if (operation.kind == OperationKind::collective) return Bound::collectives;
    const double launches =
        as_double(operation.launches) * rates_of(device_).launch_seconds;
    if (!device_.processor && seconds < 2 * launches) return Bound::launches;
    return operation.kind == OperationKind::memory ? Bound::memory
                                                   : Bound::products;
  }

  const Strategy& strategy_;
  const cluster::Cluster& cluster_;
  const cluster::Device& device_;
  const Framework framework_;
  int64_t rank_;
  std::map<std::tuple<std::string, std::string, bool>, StepOperator> found_;
  StepOperators all_;
};

}  // namespace

std::string_view to_string(Bound bound) {
  constexpr std::array<std::string_view, 4> kNames = {
      "matmuls", "memory", "launches", "collectives"};
  return kNames.at(static_cast<size_t>(bound));
}

double StepOperators::seconds_of(Bound bound) const {
  double sum = 0;
  for (const StepOperator& one : operators) {
    if (one.bound == bound) sum += one.seconds;
  }
  return sum;
}

StepOperators step_operators(
    const ModelShape& model, const Strategy& strategy,
    const cluster::Cluster& cluster) {
  const Framework framework = framework_on(
      find_framework(strategy.framework), cluster.node_of(0).device);
  const auto stages =
      stage_work(layer_work(model, strategy, framework), strategy);
  const auto rank_of_stage = rank_of_stages(strategy);
  StepOperators slowest;
  for (int64_t rank = 0; rank < strategy.layout.pp; ++rank) {
    Collector collector(
        strategy, cluster, rank * strategy.layout.stride(Axis::pp));
    for (size_t stage = 0; stage < stages.size(); ++stage) {
      if (rank_of_stage[stage] != rank) continue;
      for (const LayerWork& layer : stages[stage]) collector.add(layer);
    }
    StepOperators all = collector.take();
    if (all.seconds + all.waits > slowest.seconds + slowest.waits ||
        rank == 0) {
      slowest = std::move(all);
    }
  }
  return slowest;
}

}  // namespace echelon::cost
