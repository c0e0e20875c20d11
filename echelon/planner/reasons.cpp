#include "echelon/planner/reasons.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "echelon/cost/collective_time.h"
#include "echelon/planner/device_sizes.h"
#include "echelon/planner/search_space.h"
#include "echelon/text/units.h"

namespace echelon {
namespace {

std::string rate_text(double bytes_per_second) {
  return format_number(bytes_per_second / 1e9) + " GB/s";
}

std::string axis_name(Axis axis) {
  return std::string(short_name(axis));
}

struct NamedSeconds {
  std::string name;
  double seconds = 0;
};

// What a step is spent on, largest first.
std::vector<NamedSeconds> named_parts(const StepEstimate& step) {
  const StepParts& parts = step.parts;
  std::vector<NamedSeconds> all = {
      {"matrix products", parts.matrix},
      {"operators bound by memory", parts.memory},
      {"computing again", parts.recompute},
      {"waiting for other stages", parts.bubble},
      {"the optimizer", parts.optimizer},
      {"everything else", parts.other}};
  for (const Axis axis : kAxes) {
    all.push_back(
        {"communication of " + axis_name(axis),
         parts.exposed[static_cast<size_t>(axis)]});
  }
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) {
    return a.seconds > b.seconds;
  });
  return all;
}

std::string share_text(double part, double whole) {
  return format_percent(whole > 0 ? part / whole : 0);
}

// Weights, gradients and optimizer state when nothing is cut.
double whole_state_bytes(const PlanRequest& request, const Plan& plan) {
  Strategy whole = plan.strategy;
  whole.layout = {};
  whole.zero_stage = 0;
  whole.gather_once = false;
  whole.offload_optimizer = false;
  whole.stages_per_rank = 0;
  whole.stage_layers.clear();
  whole.rank_microbatch.clear();
  whole.global_batch = whole.microbatch_size;
  return least_bytes(request.model, whole);
}

bool uses_host(const Strategy& strategy) {
  return strategy.offload_optimizer || strategy.offload_activations;
}

std::string layers_text(int64_t layers) {
  return format_count(layers) + (layers == 1 ? " layer" : " layers");
}

std::string state_sentence(const PlanRequest& request, const Plan& plan) {
  const double state = whole_state_bytes(request, plan);
  const double usable = usable_device_bytes(request.cluster);
  std::string text = "Weights, gradients and optimizer state of " +
                     request.model.name + " are " + format_bytes(state);
  if (state > usable) {
    text += ", and a device has " + format_bytes(usable) +
            " for a job: they have to " + "lie on " +
            format_count(static_cast<int64_t>(std::ceil(state / usable))) +
            " devices at least, before any activation" +
            (uses_host(plan.strategy)
                 ? ", unless a part of it waits in the hosts' memory, as here."
                 : ".");
  } else {
    text += ", which fit in the " + format_bytes(usable) + " of one device.";
  }
  return text;
}

std::string limits_sentence(const Plan& best) {
  const auto parts = named_parts(best.step);
  std::string text = " Of a step of " + format_seconds(best.step.step_seconds) +
                     ", matrix products take " +
                     share_text(best.step.parts.matrix, best.step.step_seconds);
  int named = 0;
  for (const auto& part : parts) {
    if (part.name == "matrix products" || named == 3) continue;
    if (part.seconds < 0.01 * best.step.step_seconds) break;
    text += ", " + part.name + " " +
            share_text(part.seconds, best.step.step_seconds);
    ++named;
  }
  return text + ".";
}

const Node& largest_group(const Cluster& cluster) {
  return std::max_element(
             cluster.groups.begin(), cluster.groups.end(),
             [](const auto& a, const auto& b) {
               return a.count * a.node.num_devices <
                      b.count * b.node.num_devices;
             })
      ->node;
}

double exposed(const Plan& plan, Axis axis) {
  return plan.step.parts.exposed[static_cast<size_t>(axis)];
}

std::string why_tensor(const PlanRequest& request, const Plan& best) {
  const int64_t tp = best.strategy.layout.tp;
  if (tp == 1) return "";
  const Node& node = largest_group(request.cluster);
  std::string text = "tp=" + std::to_string(tp) + " cuts each layer";
  if (tp <= node.num_devices) {
    text += " within a node, where a device sends " +
            rate_text(node.inside.bytes_per_second);
    if (request.cluster.num_nodes() > 1) {
      text +=
          " (" + rate_text(node.network.bytes_per_second) + " between nodes)";
    }
  } else {
    text += " across nodes, at " + rate_text(node.network.bytes_per_second);
  }
  return text + "; it costs " +
         share_text(exposed(best, Axis::tp), best.step.step_seconds) +
         " of the step. ";
}

std::string why_pipeline(const PlanRequest& request, const Plan& best) {
  const Strategy& strategy = best.strategy;
  if (strategy.layout.pp == 1) return "";
  const int64_t stages =
      strategy.layout.pp * std::max<int64_t>(1, strategy.stages_per_rank);
  std::string text = "pp=" + std::to_string(strategy.layout.pp) + " cuts the " +
                     format_count(num_layers(request.model)) + " layers into " +
                     format_count(stages) +
                     " stages, which send their outputs alone; with " +
                     format_count(strategy.num_microbatches()) +
                     " microbatches and " + strategy.schedule;
  if (strategy.stages_per_rank > 1) {
    text +=
        " over " + std::to_string(strategy.stages_per_rank) + " stages a rank";
  }
  return text + " a rank waits " +
         share_text(best.step.parts.bubble, best.step.step_seconds) +
         " of the step. ";
}

// Where it is not the usual one.
std::string why_order(const PlanRequest& request, const Plan& best) {
  Strategy usual = best.strategy;
  usual.layout.order = kAxes;
  if (usual.layout == best.strategy.layout) return "";
  std::string text;
  for (const Axis axis : best.strategy.layout.used_axes()) {
    text += (text.empty() ? "Ranks go through the axes in the order " : ", ") +
            axis_name(axis);
  }
  text += ", outermost first";
  for (const Axis axis : {Axis::dp_shard, Axis::dp_replicate}) {
    const GroupPlace here = place_of(best.strategy, request.cluster, axis);
    const int64_t before =
        place_of(usual, request.cluster, axis).ranks_per_node;
    if (here.ranks_per_node <= before) continue;
    text += ": " + format_count(here.ranks_per_node) + " of the " +
            format_count(here.ranks) + " ranks of " + axis_name(axis) +
            " share a node, in the usual order " + format_count(before);
    break;
  }
  return text + ". ";
}

std::string why_data(const Plan& best) {
  const Strategy& strategy = best.strategy;
  const Layout& layout = strategy.layout;
  if (layout.data_degree() == 1) return "";
  std::string text;
  if (layout.dp_shard > 1) {
    const char* what =
        strategy.zero_stage >= 3   ? "parameters, gradients and optimizer state"
        : strategy.zero_stage == 2 ? "gradients and optimizer state"
                                   : "the optimizer state";
    text += "fsdp=" + std::to_string(layout.dp_shard) + " shares out " + what +
            ". ";
  }
  if (layout.dp_replicate > 1) {
    text += std::to_string(layout.dp_replicate) +
            " copies take samples of their own. ";
  }
  const auto at = [&](const auto& seconds) {
    return seconds[static_cast<size_t>(Axis::dp_replicate)] +
           seconds[static_cast<size_t>(Axis::dp_shard)];
  };
  const double all = at(best.step.communication);
  const double seen = at(best.step.parts.exposed);
  text += "Their sums take " + format_seconds(all) + " a step, of which " +
          format_seconds(seen) + " are not hidden. ";
  return text;
}

// On a cluster of several kinds: who gets what.
std::string why_sizes(const PlanRequest& request, const Plan& best) {
  const Strategy& strategy = best.strategy;
  const auto& groups = request.cluster.groups;
  const auto speeds = device_speeds(
      request.model, request.cluster, request.seq_len, request.precision,
      request.stack);
  if (speeds.empty()) return "";
  std::string text = "The devices differ: ";
  for (size_t group = 0; group < groups.size(); ++group) {
    text += (group == 0 ? "" : ", ") + groups[group].node.device.name +
            " does " + format_percent(speeds[group]);
  }
  text += " of what the fastest does. ";
  const bool stages = !strategy.stage_layers.empty();
  const bool batches = !strategy.rank_microbatch.empty();
  if (!stages && !batches) {
    return text + "All take equal parts, and the slowest sets the pace. ";
  }
  text += stages && batches ? "Stages and batches are"
          : stages          ? "Stages are"
                            : "Batches of the data-parallel ranks are";
  return text + " sized to them. ";
}

std::string why_memory(const PlanRequest& request, const Plan& best) {
  const Strategy& strategy = best.strategy;
  const double usable = usable_fullest_bytes(request, best);
  const double peak = best.step.memory.peak_bytes();
  std::string text = (request.cluster.mixed() ? "The fullest device holds "
                                              : "A device holds ") +
                     format_bytes(peak) + " of " + format_bytes(usable);
  if (strategy.recompute == Recompute::none && !uses_host(strategy)) {
    return text + ", so nothing is computed twice.";
  }
  text += "; for that";
  if (strategy.recompute != Recompute::none) {
    text += strategy.recompute == Recompute::all
                ? " backward computes "
                : " backward computes the cheap operators of ";
    text += strategy.recompute_layers < 0
                ? std::string("every layer")
                : layers_text(strategy.recompute_layers) + " of each stage";
    text += " again (" +
            share_text(best.step.parts.recompute, best.step.step_seconds) +
            " of the step)";
  }
  if (strategy.offload_optimizer) {
    text += std::string(strategy.recompute != Recompute::none ? " and" : "") +
            " the optimizer state lies on the host";
  }
  if (strategy.offload_activations) text += ", activations wait on the host";
  return text + ".";
}

}  // namespace

double computing_share(const StepEstimate& step) {
  const double computing = step.parts.matrix + step.parts.memory;
  return step.step_seconds > 0 ? computing / step.step_seconds : 0;
}

double usable_fullest_bytes(const PlanRequest& request, const Plan& plan) {
  const auto& memory = plan.step.memory;
  const double limit =
      memory.ranks.empty()
          ? 0
          : memory.limit(static_cast<size_t>(memory.fullest()));
  return limit > 0 ? limit : usable_device_bytes(request.cluster);
}

double usable_device_bytes(const Cluster& cluster) {
  double least = usable_bytes(cluster.groups.front().node.device);
  for (const auto& group : cluster.groups) {
    least = std::min(least, usable_bytes(group.node.device));
  }
  return least;
}

Reason explain_best(const PlanRequest& request, const Plan& best) {
  Reason reason;
  reason.diagnosis = state_sentence(request, best) + limits_sentence(best);
  reason.fix = to_string(best.strategy);
  reason.why = why_tensor(request, best) + why_pipeline(request, best) +
               why_order(request, best) + why_sizes(request, best) +
               why_data(best) + why_memory(request, best);
  return reason;
}

std::string explain_slower(const Plan& slower, const Plan& best) {
  const double ratio = slower.step.step_seconds / best.step.step_seconds;
  std::string text = "takes " + format_seconds(slower.step.step_seconds);
  if (ratio >= 1.995) {
    text += ", " + format_number(ratio) + " times as long";
  } else if (ratio >= 1.0005) {
    text += ", " + format_percent(ratio - 1) + " longer";
  } else {
    text += ", as long as the best";
  }
  double most = 0;
  std::string what;
  const auto before = named_parts(best.step);
  for (const auto& part : named_parts(slower.step)) {
    const auto at = std::find_if(
        before.begin(), before.end(),
        [&](const auto& other) { return other.name == part.name; });
    const double more = part.seconds - at->seconds;
    if (more <= most) continue;
    most = more;
    what = ": " + part.name + " " + format_seconds(part.seconds) + ", not " +
           format_seconds(at->seconds);
  }
  if (most > 0.001 * best.step.step_seconds) text += what;
  return text;
}

std::string explain_unfit(const PlanRequest& request, const Plan& plan) {
  const auto& memory = plan.step.memory;
  std::string text = "needs " + format_bytes(memory.peak_bytes()) + " of the " +
                     format_bytes(usable_fullest_bytes(request, plan)) +
                     " that a device has for a job";
  if (memory.ranks.empty()) return text;
  const auto& fullest = memory.ranks[static_cast<size_t>(memory.fullest())];
  std::vector<MemoryKind> kinds(kMemoryKinds.begin(), kMemoryKinds.end());
  std::sort(kinds.begin(), kinds.end(), [&](MemoryKind a, MemoryKind b) {
    return fullest[a] > fullest[b];
  });
  for (size_t i = 0; i < 2 && fullest[kinds[i]] > 0; ++i) {
    text += (i == 0 ? ": " : ", ") + std::string(to_string(kinds[i])) + " " +
            format_bytes(fullest[kinds[i]]);
  }
  return text;
}

Reason explain_nothing_fits(
    const PlanRequest& request, const Plan& closest,
    const std::optional<Plan>& smallest) {
  Reason reason;
  reason.diagnosis = "Nothing fits. " + state_sentence(request, closest);
  reason.fix = "The closest, " + to_string(closest.strategy) + ", " +
               explain_unfit(request, closest) + ".";
  if (smallest) {
    reason.why =
        format_count(smallest->devices) + " such devices would do, with " +
        to_string(smallest->strategy) + ": " +
        format_bytes(smallest->step.memory.peak_bytes()) + " a device, " +
        format_seconds(smallest->step.step_seconds) + " a step.";
  } else {
    reason.why =
        "More of these devices would not help: a larger batch, other "
        "constraints "
        "(--fix) or devices with more memory would.";
  }
  return reason;
}

}  // namespace echelon
