// A plan walks the step of one rank for each place in the pipeline
// (memory_walk.h); the other ranks of that place hold the same. Advice comes
// from the same walk: one setting is changed, the job is planned again, and the
// difference of the largest peaks is what the setting saves. Each setting is
// tried alone, and one that saves less than a hundredth is not mentioned.
#include "echelon/memory_plan/memory_plan.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>
#include <utility>

#include "echelon/layout/mesh.h"
#include "echelon/memory_plan/memory_walk.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::memory_plan {
namespace {

RankPlan plan_rank(
    const MemoryModel& model, const Job& job, int pipeline_rank, bool once) {
  RankPlan plan = detail::walk_step(
      model, job, {.pipeline_rank = pipeline_rank, .unshard_once = once});
  const Mesh mesh(job.layout);
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    if (mesh.coordinate(rank, Axis::pp) == pipeline_rank) {
      plan.ranks.push_back(static_cast<int>(rank));
    }
  }
  return plan;
}

int64_t largest_peak(const MemoryModel& model, const Job& job, bool once) {
  int64_t most = 0;
  for (int rank = 0; rank < model.schedule.num_ranks(); ++rank) {
    most = std::max(most, plan_rank(model, job, rank, once).peak.total());
  }
  return most;
}

// Scales the bytes of everything that grows with the samples of a microbatch.
MemoryModel with_batch(MemoryModel model, double factor) {
  const auto scale = [&](int64_t& bytes) {
    bytes = static_cast<int64_t>(static_cast<double>(bytes) * factor);
  };
  for (auto& layer : model.layers) {
    scale(layer.input_bytes);
    scale(layer.output_bytes);
    for (auto& use : layer.use) {
      scale(use.kept_bytes);
      scale(use.repeated_bytes);
      scale(use.forward_peak_bytes);
      // Gradients of parameters are as large for any number of samples.
      use.backward_peak_bytes -= use.backward_peak_gradient_bytes;
      scale(use.backward_peak_bytes);
      use.backward_peak_bytes += use.backward_peak_gradient_bytes;
      scale(use.backward_working_bytes);
    }
  }
  return model;
}

struct Change {
  std::string setting;
  std::function<bool(Job&)> apply;  // false: nothing to change
};

std::vector<Change> changes() {
  std::vector<Change> list;
  const auto add = [&]<class Enum>(
                       const char* key, Enum MemoryOptions::*field,
                       Enum value) {
    list.push_back(
        {format("memory.{} = \"{}\"", key, to_string(value)), [=](Job& job) {
           return std::exchange(job.memory.*field, value) != value;
         }});
  };
  add("recompute", &MemoryOptions::recompute, Recompute::selective);
  add("recompute", &MemoryOptions::recompute, Recompute::all);
  add("activations", &MemoryOptions::activations, Activations::bf16);
  add("activations", &MemoryOptions::activations, Activations::offload);
  add("offload", &MemoryOptions::offload, Offload::optimizer);
  add("offload", &MemoryOptions::offload, Offload::parameters);
  for (const int64_t stage : {2, 3}) {
    list.push_back({format("shard.stage = {}", stage), [stage](Job& job) {
                      return job.layout.dp_shard > 1 &&
                             std::exchange(job.shard.stage, stage) < stage;
                    }});
  }
  list.push_back({"shard.prefetch = 0", [](Job& job) {
                    return job.layout.dp_shard > 1 &&
                           std::exchange(job.shard.prefetch, 0) > 0;
                  }});
  list.push_back({"shard.gather = \"use\"", [](Job& job) {
                    return job.layout.dp_shard > 1 && job.layout.pp > 1 &&
                           std::exchange(job.shard.gather, Gather::use) !=
                               Gather::use;
                  }});
  return list;
}

// Shards the replicas of the model over their ranks.
std::string shard_replicas(Job& job) {
  if (job.layout.dp_replicate == 1) return {};
  job.layout.dp_shard *= job.layout.dp_replicate;
  job.layout.dp_replicate = 1;
  return "--layout " + to_string(job.layout);
}

timeline::MemoryKind largest_kind(const timeline::MemoryByKind& memory) {
  return *std::ranges::max_element(
      timeline::kMemoryKinds, {},
      [&](timeline::MemoryKind kind) { return memory[kind]; });
}

// A line for each of the best.
std::string help_of(
    const std::vector<Advice>& list, int64_t limit_bytes,
    size_t most = kMostAdvice) {
  std::string text;
  for (size_t i = 0; i < std::min(list.size(), most); ++i) {
    const auto& advice = list[i];
    const bool fits = limit_bytes > 0 && advice.peak_bytes <= limit_bytes;
    text += format(
        "\n  {} saves {}: {}{}", advice.setting,
        format_bytes(advice.saves_bytes), format_bytes(advice.peak_bytes),
        fits ? ", which fits" : "");
  }
  return text.empty() ? "\n  no single setting makes it smaller; use more ranks"
                      : text;
}

// How many other ranks of a pipeline the one with most sends to or receives
// from.
size_t most_peers(const Schedule& schedule) {
  std::vector<std::set<int>> peers(static_cast<size_t>(schedule.num_ranks()));
  for (int stage = 1; stage < schedule.num_stages(); ++stage) {
    const int before = schedule.rank_of_stage[static_cast<size_t>(stage - 1)];
    const int rank = schedule.rank_of_stage[static_cast<size_t>(stage)];
    if (before == rank) continue;
    peers[static_cast<size_t>(before)].insert(rank);
    peers[static_cast<size_t>(rank)].insert(before);
  }
  size_t most = 0;
  for (const auto& one : peers) most = std::max(most, one.size());
  return most;
}

}  // namespace

const RankPlan& MemoryPlan::largest() const {
  return *std::ranges::max_element(
      ranks, {}, [](const RankPlan& rank) { return rank.peak.total(); });
}

std::vector<cost::RecomputeCost> recompute_costs(const MemoryModel& model) {
  std::vector<cost::RecomputeCost> costs;
  std::vector<int64_t> repeated;
  for (size_t i = 0; i + 1 < model.layers.size(); ++i) {
    const auto& layer = model.layers[i];
    cost::RecomputeCost cost{
        .name = layer.name, .again_flops = layer.again_flops};
    for (const auto choice : cost::kRecomputes) {
      const auto number = static_cast<size_t>(choice);
      cost.kept_bytes[number] = layer.use[number].kept_bytes;
    }
    costs.push_back(std::move(cost));
    repeated.push_back(layer.use[0].repeated_bytes);
  }
  cost::keep_for_the_next(costs, repeated);
  return costs;
}

bool unshards_once(const MemoryModel& model, const Job& job) {
  const bool sharded = job.layout.dp_shard > 1 && job.shard.stage == 3;
  if (!sharded && job.memory.offload != Offload::parameters) return false;
  if (job.shard.gather != Gather::automatic)
    return job.shard.gather == Gather::step;
  if (job.layout.pp == 1) return false;
  const int64_t limit = job.memory.limit_bytes;
  return limit == 0 || largest_peak(model, job, true) <= limit;
}

std::vector<int64_t>
communicator_sizes(const MemoryModel& model, const Layout& layout) {
  const Mesh mesh(layout);
  std::set<std::vector<int>> sets = {
      mesh.ranks_along(0, std::vector<Axis>(kAxes.begin(), kAxes.end())),
      mesh.ranks_along(0, {Axis::dp_replicate, Axis::dp_shard, Axis::cp}),
      mesh.ranks_along(
          0, {Axis::dp_replicate, Axis::dp_shard, Axis::ep, Axis::cp}),
      mesh.ranks_along(0, {Axis::dp_shard, Axis::cp})};
  if (layout.dp_shard > 1 || layout.cp > 1) {
    sets.insert(mesh.ranks_along(0, {Axis::dp_shard, Axis::ep, Axis::cp}));
  }
  for (const Axis axis : kAxes) {
    if (axis != Axis::pp) sets.insert(mesh.ranks_along(0, axis));
  }
  std::vector<int64_t> sizes;
  if (layout.pp > 1) sizes.push_back(layout.pp);
  for (const auto& ranks : sets) {
    if (ranks.size() > 1) sizes.push_back(static_cast<int64_t>(ranks.size()));
  }
  sizes.insert(sizes.end(), most_peers(model.schedule), 2);
  std::ranges::sort(sizes, std::greater<>());
  return sizes;
}

MemoryPlan plan_memory(const MemoryModel& model, const Job& job) {
  MemoryPlan plan{.notes = model.notes};
  const auto sizes = communicator_sizes(model, job.layout);
  if (!model.host_is_device && !sizes.empty()) {
    plan.notes.push_back(format(
        "not in the plan: the GPU's context and {}, of {} ranks",
        counted(static_cast<int64_t>(sizes.size()), "NCCL communicator"),
        join(sizes, ", ")));
  }
  const bool once = unshards_once(model, job);
  for (int rank = 0; rank < model.schedule.num_ranks(); ++rank) {
    plan.ranks.push_back(plan_rank(model, job, rank, once));
  }
  return plan;
}

std::vector<Advice> advise(const MemoryModel& model, const Job& job) {
  const int64_t now = plan_memory(model, job).largest().peak.total();
  std::vector<Advice> list;
  const auto add = [&](const std::string& setting, const MemoryModel& with,
                       const Job& changed) {
    const int64_t then = plan_memory(with, changed).largest().peak.total();
    if (now - then < now / 100) return;
    list.push_back({setting, then, now - then});
  };
  for (const auto& change : changes()) {
    Job changed = job;
    if (change.apply(changed)) add(change.setting, model, changed);
  }
  Job changed = job;
  if (const auto setting = shard_replicas(changed); !setting.empty()) {
    add(setting, model, changed);
  }
  // Twice the passes with half the samples each: the counts are halved and the
  // schedule gets the further passes.
  if (job.layout.pp == 1) {
    changed = job;
    changed.train.accumulate *= 2;
    MemoryModel halved = with_batch(model, 0.5);
    auto& actions = halved.schedule.ranks[0];
    const auto count = halved.schedule.num_microbatches;
    for (int32_t i = count; i < 2 * count; ++i) {
      actions.push_back({ActionKind::forward, 0, i});
      actions.push_back({ActionKind::backward, 0, i});
    }
    halved.schedule.num_microbatches = 2 * count;
    add(format("train.accumulate = {}", changed.train.accumulate), halved,
        changed);
  }
  std::ranges::stable_sort(list, std::greater<>(), &Advice::saves_bytes);
  return list;
}

std::string explain_shortage(
    const MemoryModel& model, const Job& job, int pipeline_rank,
    const timeline::MemoryByKind& held, int64_t limit_bytes) {
  const MemoryPlan plan = plan_memory(model, job);
  const RankPlan& own = plan.ranks.at(static_cast<size_t>(pipeline_rank));
  const auto above = [&](timeline::MemoryKind kind) {
    return held[kind] - own.peak[kind];
  };
  const auto grown =
      *std::ranges::max_element(timeline::kMemoryKinds, {}, above);
  const auto most = largest_kind(held);
  // A kind far above its plan is likelier the cause than the largest one.
  const bool exceeds = above(grown) > own.peak.total() / 20;
  const timeline::MemoryKind named = exceeds ? grown : most;
  std::string text = format(
      "it holds {}, of which {} are {}{}; the plan (--dry-run) says a peak of "
      "{} in the {}",
      format_bytes(held.total()), format_bytes(held[named]),
      timeline::to_string(named),
      exceeds ? format(" (planned: {})", format_bytes(own.peak[named])) : "",
      format_bytes(own.peak.total()), own.moment);
  if (limit_bytes > 0) {
    text += ", the limit is " + format_bytes(limit_bytes);
  }
  return text + help_of(advise(model, job), limit_bytes);
}

std::string explain_limit(
    const MemoryModel& model, const Job& job, int64_t limit_bytes,
    size_t most_advice) {
  const MemoryPlan plan = plan_memory(model, job);
  const RankPlan& rank = plan.largest();
  if (limit_bytes <= 0 || rank.peak.total() <= limit_bytes) return {};
  const auto kind = largest_kind(rank.peak);
  return format(
             "rank {} needs {} in the {}, {} more than the limit of {}; the "
             "largest part: {}, {}",
             rank.ranks.front(), format_bytes(rank.peak.total()), rank.moment,
             format_bytes(rank.peak.total() - limit_bytes),
             format_bytes(limit_bytes), timeline::to_string(kind),
             format_bytes(rank.peak[kind])) +
         help_of(advise(model, job), limit_bytes, most_advice);
}

std::vector<int> all_ranks(const Layout& layout) {
  std::vector<int> ranks(static_cast<size_t>(layout.num_ranks()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::string explain_host_memory(
    const MemoryModel& model, const Job& job, const std::vector<int>& ranks,
    int64_t available_bytes) {
  const bool activations = job.memory.activations == Activations::offload;
  const bool offloads = job.memory.offload != Offload::none || activations;
  if (!offloads && !model.host_is_device) return {};
  const std::set<int> here(ranks.begin(), ranks.end());
  int64_t needed = 0;
  int64_t copied = 0;
  for (const auto& plan : plan_memory(model, job).ranks) {
    const int64_t each = plan.host_bytes + plan.snapshot_bytes +
                         (model.host_is_device ? plan.peak.total() : 0);
    const int64_t number = std::ranges::count_if(
        plan.ranks, [&](int rank) { return here.contains(rank); });
    needed += each * number;
    copied += plan.snapshot_bytes * number;
  }
  if (needed <= available_bytes) return {};
  const std::string place =
      !offloads ? format("[layout] {}", to_string(job.layout))
      : job.memory.offload == Offload::none
          ? "[memory] activations = \"offload\""
          : format("[memory] offload = \"{}\"", to_string(job.memory.offload));
  return format(
      "{}: {} {} of its memory, {}{} are available; {}let fewer ranks share a "
      "host, or shard the parameters over more of them (--layout fsdp=N)",
      place,
      ranks.size() == 1
          ? format("rank {} needs", ranks.front())
          : format("the {} ranks of this host need", ranks.size()),
      format_bytes(needed),
      copied > 0 ? format_bytes(copied) +
                       " of them for what checkpoints are written from, "
                 : "",
      format_bytes(available_bytes), offloads ? "offload less, " : "");
}

}  // namespace echelon::memory_plan
