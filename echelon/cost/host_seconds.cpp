#include "echelon/cost/host_seconds.h"

#include <set>
#include <string_view>

namespace echelon {
namespace {

using Names = std::set<std::string_view>;

void add_names(Names& names, const Operations& operations) {
  for (const Operation& operation : operations) {
    if (operation.kind == OperationKind::collective || is_view(operation))
      continue;
    names.insert(operation.name);
  }
}

}  // namespace

double operator_kinds(const Layers& layers) {
  Names forward, gradient;
  for (const LayerWork* layer : layers) {
    add_names(forward, layer->forward);
    add_names(gradient, layer->backward_input);
    add_names(gradient, layer->backward_weight);
  }
  return static_cast<double>(forward.size() + gradient.size());
}

HostWork host_work_beside(const Device& device, double computing_seconds) {
  const HostWork* below = nullptr;
  const HostWork* above = nullptr;
  for (const HostWork& work : device.host_work) {
    if (work.computing_seconds <= computing_seconds) {
      if (!below || work.computing_seconds > below->computing_seconds)
        below = &work;
    } else if (!above || work.computing_seconds < above->computing_seconds) {
      above = &work;
    }
  }
  if (!below && !above) return {};
  if (!above) return *below;
  if (!below) return *above;
  const double part = (computing_seconds - below->computing_seconds) /
                      (above->computing_seconds - below->computing_seconds);
  const auto between = [&](double HostWork::*seconds) {
    return below->*seconds + part * (above->*seconds - below->*seconds);
  };
  return {
      .step_seconds = between(&HostWork::step_seconds),
      .layer_seconds = between(&HostWork::layer_seconds),
      .pass_seconds = between(&HostWork::pass_seconds),
      .action_seconds = between(&HostWork::action_seconds),
      .pipeline_seconds = between(&HostWork::pipeline_seconds),
      .operator_seconds = between(&HostWork::operator_seconds),
      .computing_seconds = computing_seconds};
}

HostWork host_work_of(const Stack& stack, const Device& device) {
  if (!stack.computing_seconds) return {};
  return host_work_beside(device, *stack.computing_seconds);
}

double action_host_seconds(
    const Strategy& strategy, const Stack& stack, const Device& device) {
  if (strategy.layout.pp == 1) return 0;
  return host_work_of(stack, device).action_seconds;
}

double step_host_seconds(
    const Strategy& strategy, const Stack& stack, const Device& device,
    const Layers& layers) {
  const HostWork host = host_work_of(stack, device);
  double seconds = stack.step_host_seconds + host.step_seconds;
  if (strategy.layout.pp > 1) seconds += host.pipeline_seconds;
  if (host.operator_seconds > 0) {
    seconds += operator_kinds(layers) * host.operator_seconds;
  }
  for (const LayerWork* layer : layers) {
    if (layer->parameters == 0) continue;
    seconds += static_cast<double>(layer->repeat) * host.layer_seconds;
  }
  return seconds;
}

}  // namespace echelon
