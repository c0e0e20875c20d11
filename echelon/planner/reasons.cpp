// The sentences quote the estimates by which the plans were ranked. Besides,
// only counterexamples are computed: the state without any sharding, the usual
// order of the axes, the search with fewer constraints. A contradiction is
// explained by a minimal set of constraints, found by leaving out one after the
// other, and by the values that the last one of the set could have beside the
// others.
#include "echelon/planner/reasons.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>

#include "echelon/cost/collective_time.h"
#include "echelon/planner/device_sizes.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::planner {
namespace {

std::string rate_text(double bytes_per_second) {
  return format("{} GB/s", format_number(bytes_per_second / 1e9));
}

struct NamedSeconds {
  std::string name;
  double seconds = 0;
};

// The parts of a step, largest first.
std::vector<NamedSeconds> named_parts(const cost::StepEstimate& step) {
  const cost::StepParts& parts = step.parts;
  std::vector<NamedSeconds> all = {{"matmuls", parts.matrix},
                                   {"operators bound by memory", parts.memory},
                                   {"recompute", parts.recompute},
                                   {"waiting for other stages", parts.bubble},
                                   {"the optimizer", parts.optimizer},
                                   {"everything else", parts.other}};
  for (const Axis axis : kAxes) {
    all.push_back(
        {format("communication of {}", short_name(axis)),
         parts.exposed[static_cast<size_t>(axis)]});
  }
  std::ranges::sort(all, std::greater<>(), &NamedSeconds::seconds);
  return all;
}

// A share of the step.
std::string share_text(const Plan& plan, double seconds) {
  const double step = plan.step.step_seconds;
  return format_percent(step > 0 ? seconds / step : 0);
}

// Bytes of weights, gradients and optimizer state without any sharding.
double unsharded_state_bytes(const PlanRequest& request, const Plan& plan) {
  cost::Strategy whole = plan.strategy;
  whole.layout = {};
  whole.zero_stage = 0;
  whole.unshard_once = false;
  whole.offload_optimizer = false;
  whole.stages_per_rank = 0;
  whole.stage_layers.clear();
  whole.rank_microbatch.clear();
  whole.global_batch = whole.microbatch_size;
  return cost::least_bytes(request.model, whole);
}

bool uses_host(const cost::Strategy& strategy) {
  return strategy.offload_optimizer || strategy.offload_activations;
}

std::string layers_text(int64_t layers) {
  return counted(layers, "layer");
}

std::string state_sentence(const PlanRequest& request, const Plan& plan) {
  const double state = unsharded_state_bytes(request, plan);
  const double usable = usable_device_bytes(request.cluster);
  const std::string sizes = format(
      "Weights, gradients and optimizer state of {} are {}", request.model.name,
      format_bytes(state));
  if (state <= usable) {
    return format(
        "{}, which fit in the {} of one device.", sizes, format_bytes(usable));
  }
  return format(
      "{}, and a device has {} for a job: they need at least {}, "
      "before any activation{}",
      sizes, format_bytes(usable),
      counted(std::llround(std::ceil(state / usable)), "device"),
      plan.strategy.offload_optimizer
          ? ", unless a part of it is kept in the hosts' memory, as here."
          : ".");
}

std::string limits_sentence(const Plan& best) {
  std::string text = format(
      " Of a step of {}, matmuls take {}",
      format_seconds(best.step.step_seconds),
      share_text(best, best.step.parts.matrix));
  int named = 0;
  for (const auto& part : named_parts(best.step)) {
    if (part.name == "matmuls" || named == 3) continue;
    if (part.seconds < 0.01 * best.step.step_seconds) break;
    text += format(", {} {}", part.name, share_text(best, part.seconds));
    ++named;
  }
  return text + ".";
}

const cluster::Node& largest_group(const cluster::Cluster& cluster) {
  const auto devices = [](const cluster::NodeGroup& group) {
    return group.count * group.node.num_devices;
  };
  return std::ranges::max_element(cluster.groups, {}, devices)->node;
}

std::string why_tensor(const PlanRequest& request, const Plan& best) {
  const int64_t tp = best.strategy.layout.tp;
  if (tp == 1) return "";
  const cluster::Node& node = largest_group(request.cluster);
  std::string text = format("tp={} shards each layer", tp);
  const std::string network = rate_text(node.network.bytes_per_second);
  if (tp <= node.num_devices) {
    text += " within a node, where a device sends " +
            rate_text(node.inside.bytes_per_second);
    if (request.cluster.num_nodes() > 1) {
      text += format(" ({} between nodes)", network);
    }
  } else {
    text += " across nodes, at " + network;
  }
  const auto axis = static_cast<size_t>(Axis::tp);
  return text + format(
                    "; it costs {} of the step. ",
                    share_text(best, best.step.parts.exposed[axis]));
}

std::string why_pipeline(const PlanRequest& request, const Plan& best) {
  const cost::Strategy& strategy = best.strategy;
  if (strategy.layout.pp == 1) return "";
  const int64_t stages =
      strategy.layout.pp * std::max<int64_t>(1, strategy.stages_per_rank);
  std::string text = format(
      "pp={} partitions the {} layers into {} stages, which send only their "
      "outputs; with {} and {}",
      strategy.layout.pp, format_count(num_layers(request.model)),
      format_count(stages), counted(strategy.num_microbatches(), "microbatch"),
      to_string(strategy.schedule));
  if (strategy.stages_per_rank > 1) {
    text += format(" over {} stages a rank", strategy.stages_per_rank);
  }
  return text + format(
                    ", a rank waits {} of the step. ",
                    share_text(best, best.step.parts.bubble));
}

// Empty for the usual order.
std::string why_order(const PlanRequest& request, const Plan& best) {
  cost::Strategy usual = best.strategy;
  usual.layout.order = kAxes;
  if (usual.layout == best.strategy.layout) return "";
  std::string text = format(
      "Ranks go through the axes in the order {}, outermost first",
      join(best.strategy.layout.used_axes(), ", ", short_name));
  for (const Axis axis : {Axis::dp_shard, Axis::dp_replicate}) {
    const cost::GroupPlace here =
        cost::place_of(best.strategy, request.cluster, axis);
    const int64_t before =
        cost::place_of(usual, request.cluster, axis).ranks_per_node;
    if (here.ranks_per_node <= before) continue;
    text += format(
        ": {} of the {} ranks of {} share a node, in the usual order {}",
        format_count(here.ranks_per_node), format_count(here.ranks),
        short_name(axis), format_count(before));
    break;
  }
  return text + ". ";
}

std::string why_data(const Plan& best) {
  const cost::Strategy& strategy = best.strategy;
  const Layout& layout = strategy.layout;
  if (layout.data_degree() == 1) return "";
  std::string text;
  if (layout.dp_shard > 1) {
    const char* what =
        strategy.zero_stage >= 3   ? "parameters, gradients and optimizer state"
        : strategy.zero_stage == 2 ? "gradients and optimizer state"
                                   : "the optimizer state";
    text += format("fsdp={} shards {}. ", layout.dp_shard, what);
  }
  if (layout.dp_replicate > 1) {
    text += format("{} replicas take different samples. ", layout.dp_replicate);
  }
  const auto time_text = [](const auto& seconds) {
    return format_seconds(
        seconds[static_cast<size_t>(Axis::dp_replicate)] +
        seconds[static_cast<size_t>(Axis::dp_shard)]);
  };
  return text + format(
                    "Their collectives take {} a step, of which {} are "
                    "exposed. ",
                    time_text(best.step.communication),
                    time_text(best.step.parts.exposed));
}

// Tells how work is spread over devices of several kinds; empty when all are
// alike.
std::string why_sizes(const PlanRequest& request, const Plan& best) {
  const cost::Strategy& strategy = best.strategy;
  const auto& groups = request.cluster.groups;
  const auto speeds = device_speeds(
      request.model, request.cluster, request.seq_len, request.precision,
      request.framework);
  if (speeds.empty()) return "";
  std::string text = "The devices differ: ";
  for (size_t group = 0; group < groups.size(); ++group) {
    text += format(
        "{}{} does {}", group == 0 ? "" : ", ", groups[group].node.device.name,
        format_percent(speeds[group]));
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
  const cost::Strategy& strategy = best.strategy;
  std::string text = format(
      "{} device holds {} of {}", request.cluster.mixed() ? "The fullest" : "A",
      format_bytes(best.step.memory.peak_bytes()),
      format_bytes(usable_fullest_bytes(request, best)));
  if (strategy.recompute == cost::Recompute::none && !uses_host(strategy)) {
    return text + ", so nothing is recomputed.";
  }
  text += "; for that";
  const bool recomputes = strategy.recompute != cost::Recompute::none;
  if (recomputes) {
    text += format(
        " backward recomputes {}{} ({} of the step)",
        strategy.recompute == cost::Recompute::all ? ""
                                                   : "the cheap operators of ",
        strategy.recompute_layers < 0
            ? "every layer"
            : layers_text(strategy.recompute_layers) + " of each stage",
        share_text(best, best.step.parts.recompute));
  }
  if (strategy.offload_optimizer) {
    text += recomputes ? " and" : "";
    text += " the optimizer state is kept on the host";
  }
  if (strategy.offload_activations)
    text += ", activations are kept on the host";
  return text + ".";
}

constexpr size_t kMostValues = 24;

// Leaves out each constraint without which there is still no strategy, one
// after the other. None of the remaining ones can be left out. It takes one
// search for each constraint.
Constraints smallest_conflict(SearchJob job) {
  Constraints conflict = job.constraints;
  for (size_t i = conflict.fixed().size(); i-- > 0;) {
    job.constraints = conflict.without(i);
    if (!has_strategy(job)) conflict = job.constraints;
  }
  return conflict;
}

// The nearest batches, on either side, that some layout divides.
std::string nearest_batches(SearchJob job) {
  const int64_t batch = job.global_batch;
  std::vector<std::string> found;
  for (const int64_t sign : {int64_t{-1}, int64_t{1}}) {
    // Among so many neighbours one is a multiple of the number of devices.
    for (int64_t away = 1; away <= job.devices; ++away) {
      job.global_batch = batch + sign * away;
      if (job.global_batch < 1) break;
      if (!has_strategy(job)) continue;
      found.push_back(format_count(job.global_batch));
      break;
    }
  }
  return found.empty() ? "" : format("; {} would do", join(found, " or "));
}

std::string listed(const SearchKey& key, const std::vector<int64_t>& values) {
  std::string text;
  for (size_t i = 0; i < values.size() && i < kMostValues; ++i) {
    text += (i == 0 ? "" : ", ") + key.text_of(values[i]);
  }
  return text + (values.size() > kMostValues ? ", …" : "");
}

// The last key of a conflict, and the values that it may have without the
// conflict.
struct OpenValues {
  const SearchKey& key;
  std::vector<int64_t> values;
};

OpenValues open_values(const SearchJob& job, const Constraints& conflict) {
  SearchJob without = job;
  without.constraints = conflict.without(conflict.fixed().size() - 1);
  const SearchKey& key = *conflict.fixed().back().key;
  return {key, values_of(without, key)};
}

std::string conflict_text(const SearchJob& job) {
  const Constraints conflict = smallest_conflict(job);
  const auto& fixed = conflict.fixed();
  std::string names;
  for (size_t i = 0; i < fixed.size(); ++i) {
    const char* between = i == 0 ? "" : i + 1 == fixed.size() ? " and " : ", ";
    names += between + fixed[i].text();
  }
  const auto [key, values] = open_values(job, conflict);
  const std::string where = format(
      "{} on {} with batch {}", job.model.name, counted(job.devices, "device"),
      format_count(job.global_batch));
  std::string text =
      fixed.size() == 1
          ? format("no strategy of {} has {}", where, names)
          : format("{} contradict each other for {}", names, where);
  if (!values.empty()) {
    text += format(
        "; {} may be{} {}", key.name,
        fixed.size() == 1 ? "" : ", with the others,", listed(key, values));
  }
  return text;
}

// What check_strategy says of pure data parallelism, the simplest layout.
std::string complaint(const SearchJob& job) {
  cost::Strategy plain;
  plain.layout.dp_replicate = job.devices;
  plain.global_batch = job.global_batch;
  plain.seq_len = job.seq_len;
  plain.precision = job.precision;
  plain.framework = job.framework;
  return cost::check_strategy(job.model, plain, job.cluster);
}

}  // namespace

double computing_share(const cost::StepEstimate& step) {
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

double usable_device_bytes(const cluster::Cluster& cluster) {
  const auto usable = [](const cluster::NodeGroup& group) {
    return cost::usable_bytes(group.node.device);
  };
  return usable(*std::ranges::min_element(cluster.groups, {}, usable));
}

Reason explain_best(const PlanRequest& request, const Plan& best) {
  Reason reason;
  reason.diagnosis = state_sentence(request, best) + limits_sentence(best);
  reason.fix = cost::to_string(best.strategy);
  reason.why = why_tensor(request, best) + why_pipeline(request, best) +
               why_order(request, best) + why_sizes(request, best) +
               why_data(best) + why_memory(request, best);
  return reason;
}

std::string explain_slower(const Plan& slower, const Plan& best) {
  const double ratio = slower.step.step_seconds / best.step.step_seconds;
  const std::string longer =
      ratio >= 1.995    ? format("{} times as long", format_number(ratio))
      : ratio >= 1.0005 ? format("{} longer", format_percent(ratio - 1))
                        : "as long as the best";
  const std::string text =
      format("takes {}, {}", format_seconds(slower.step.step_seconds), longer);
  double most = 0;
  std::string what;
  const auto before = named_parts(best.step);
  for (const auto& part : named_parts(slower.step)) {
    const auto at = std::ranges::find_if(
        before, [&](const auto& other) { return other.name == part.name; });
    const double more = part.seconds - at->seconds;
    if (more <= most) continue;
    most = more;
    what = format(
        ": {} {}, not {}", part.name, format_seconds(part.seconds),
        format_seconds(at->seconds));
  }
  return most > 0.001 * best.step.step_seconds ? text + what : text;
}

std::string explain_unfit(const PlanRequest& request, const Plan& plan) {
  const auto& memory = plan.step.memory;
  std::string text = format(
      "needs {} of the {} that a device has for a job",
      format_bytes(memory.peak_bytes()),
      format_bytes(usable_fullest_bytes(request, plan)));
  if (memory.ranks.empty()) return text;
  const auto& fullest = memory.ranks[static_cast<size_t>(memory.fullest())];
  std::vector<timeline::MemoryKind> kinds(
      timeline::kMemoryKinds.begin(), timeline::kMemoryKinds.end());
  std::ranges::sort(kinds, std::greater<>(), [&](timeline::MemoryKind kind) {
    return fullest[kind];
  });
  for (size_t i = 0; i < 2 && fullest[kinds[i]] > 0; ++i) {
    text += format(
        "{} {} {}", i == 0 ? ":" : ",", timeline::to_string(kinds[i]),
        format_bytes(fullest[kinds[i]]));
  }
  return text;
}

Reason explain_nothing_fits(
    const PlanRequest& request, const Plan& closest,
    const std::optional<Plan>& smallest) {
  Reason reason;
  reason.diagnosis = state_sentence(request, closest);
  reason.fix = format(
      "{} {}.", cost::to_string(closest.strategy),
      explain_unfit(request, closest));
  if (smallest) {
    reason.why = format(
        "{} suffice, with {}: {} a device, {} a step.",
        counted(smallest->devices, "such device"),
        cost::to_string(smallest->strategy),
        format_bytes(smallest->step.memory.peak_bytes()),
        format_seconds(smallest->step.step_seconds));
  } else {
    reason.why =
        "More of these devices would not help: a larger batch, other "
        "constraints (--fix) or devices with more memory would.";
  }
  return reason;
}

std::string explain_impossible(const SearchJob& job) {
  SearchJob free = job;
  free.constraints = {};
  if (has_strategy(free)) return "--fix: " + conflict_text(job);
  const std::string nearest = nearest_batches(free);
  if (!nearest.empty()) {
    return format(
        "--batch {}: no layout of {} divides it for {}{}", job.global_batch,
        counted(job.devices, "device"), job.model.name, nearest);
  }
  const std::string why = complaint(free);
  return format(
      "{} has no strategy on {} of {}{}", job.model.name,
      counted(job.devices, "device"), job.cluster.name,
      why.empty() ? "" : ": " + why);
}

std::string why_none(const SearchJob& job) {
  SearchJob free = job;
  free.constraints = {};
  if (!has_strategy(free)) {
    return "no layout divides the batch of " + format_count(job.global_batch);
  }
  const Constraints conflict = smallest_conflict(job);
  // A data-parallel degree that does not divide the batch.
  for (const auto& fixed : conflict.fixed()) {
    const std::string& name = fixed.key->name;
    if (name != "dp" && name != "fsdp" && name != "data") continue;
    if (job.global_batch % fixed.value == 0) continue;
    return format(
        "a batch of {} does not divide by {}",
        counted(job.global_batch, "sample"), counted(fixed.value, "rank"));
  }
  const auto [key, values] = open_values(job, conflict);
  const char* where = "is not possible here";
  if (values.empty()) return where;
  return format("{}; {} may be {}", where, key.name, listed(key, values));
}

std::vector<int64_t> values_of(const SearchJob& job, const SearchKey& key) {
  std::set<int64_t> values;
  for (const auto& saver :
       list_savers(job, rules_of_framework(job.framework).offload)) {
    if (key.name == "recompute") {
      values.insert(static_cast<int64_t>(saver.recompute));
    } else if (key.name == "offload") {
      values.insert(int64_t{saver.offload_optimizer});
    } else if (key.name == "activations") {
      values.insert(int64_t{saver.offload_activations});
    }
  }
  if (!values.empty()) return {values.begin(), values.end()};
  // Only these keys and the order differ between the variants of a group. The
  // others are read off the group, which saves listing its variants.
  const bool of_variants = key.name == "schedule" || key.name == "gather" ||
                           key.name == "stage" || key.name == "stages_per_rank";
  for (const auto& group : list_groups(job)) {
    if (key.name == "recompute_layers") {
      int64_t most = 0;
      for (const auto& variant : list_variants(job, group)) {
        most = std::max(most, layers_of_stage(job.model, variant));
      }
      values.insert(-1);
      for (int64_t layers = 1; layers < most; ++layers) values.insert(layers);
      continue;
    }
    if (key.name == "order") {
      for (const int order : orders_of(job, group.layout)) values.insert(order);
    } else if (!of_variants) {
      values.insert(key.value(group));
      continue;
    }
    for (const auto& variant : list_variants(job, group)) {
      values.insert(key.value(variant));
    }
  }
  return {values.begin(), values.end()};
}

}  // namespace echelon::planner
