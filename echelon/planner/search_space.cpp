// Nested loops over the divisors of the devices give tp, pp, cp, ep and the
// data axes; inside are the orders of axes, sequence parallelism and the sizes
// of microbatches. Each loop asks the constraints as soon as its value is
// known, so that a fixed setting removes whole branches. A layout without any
// valid variant is left out.
#include "echelon/planner/search_space.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "echelon/cost/choices.h"
#include "echelon/cost/context_way.h"
#include "echelon/cost/step_estimate.h"
#include "echelon/layout/partition.h"
#include "echelon/planner/axis_orders.h"
#include "echelon/planner/device_sizes.h"
#include "echelon/schedule/options.h"

namespace echelon::planner {
namespace {

constexpr int64_t kMostSmallMicrobatch = 32;
constexpr int64_t kMostStagesPerRank = 16;

std::vector<int64_t> microbatch_sizes(int64_t rank_batch) {
  std::vector<int64_t> sizes;
  for (const int64_t size : divisors(rank_batch)) {
    const int64_t parts = rank_batch / size;
    // All small sizes are tried, and of the large ones those with 2^n passes.
    const bool half = (parts & (parts - 1)) == 0;
    if (size <= kMostSmallMicrobatch || half) sizes.push_back(size);
  }
  return sizes;
}

// The embedding and the head of a transformer may be stages of their own.
int64_t most_stages(const cost::ModelShape& model) {
  return num_layers(model) + (model.transformer ? 2 : 0);
}

std::vector<int64_t> stages_per_rank(
    const cost::ModelShape& model, ScheduleKind schedule, int64_t pp) {
  if (!takes_any_stages(schedule)) return {stages_per_rank_of(schedule)};
  // Of the counts with equally long stages, the fewest and those that are even,
  // and the one that gives ends of the pipeline to embedding and head alone.
  std::vector<int64_t> counts;
  const int64_t blocks = num_layers(model);
  int64_t shortest = blocks + 1;
  for (int64_t count = 2; count <= kMostStagesPerRank; ++count) {
    const int64_t stages = pp * count;
    if (stages > most_stages(model)) break;
    const int64_t longest = (blocks + stages - 1) / stages;
    const bool uneven = blocks % stages != 0 && stages < blocks;
    if (longest >= shortest && uneven) continue;
    shortest = longest;
    counts.push_back(count);
  }
  return counts;
}

cost::Strategy
with_microbatches(cost::Strategy variant, const cost::Strategy& group) {
  variant.sequence_parallel = group.sequence_parallel;
  variant.product_chunks = group.product_chunks;
  variant.microbatch_size = group.microbatch_size;
  variant.rank_microbatch = group.rank_microbatch;
  return variant;
}

class Lister {
 public:
  explicit Lister(const SearchJob& job)
      : job_(job), rules_(rules_of_framework(job.framework)), variants_(job) {}

  std::vector<cost::Strategy> run() {
    over(
        "tp", rules_.tensor_parallel, job_.devices,
        [&](int64_t tp, int64_t left) {
          layout_.tp = tp;
          over("pp", rules_.pipelines, left, [&](int64_t pp, int64_t left) {
            layout_.pp = pp;
            if (pp > num_layers(job_.model)) return;
            over("cp", with_context(), left, [&](int64_t cp, int64_t left) {
              layout_.cp = cp;
              over("ep", with_experts(), left, [&](int64_t ep, int64_t left) {
                layout_.ep = ep;
                data_axes(left);
              });
            });
          });
        });
    return std::move(groups_);
  }

 private:
  bool with_context() const {
    return rules_.context_parallel && job_.model.transformer;
  }
  bool with_experts() const {
    return rules_.expert_parallel && job_.model.transformer &&
           job_.model.transformer->experts.experts > 0;
  }

  template <class Next>
  void over(const char* key, bool allowed, int64_t left, const Next& next) {
    for (const int64_t degree : divisors(left)) {
      if (degree > 1 && !allowed) break;
      if (job_.constraints.allow(key, degree)) next(degree, left / degree);
    }
  }

  void data_axes(int64_t data) {
    if (!job_.constraints.allow("data", data)) return;
    const bool sized = !job_.speeds.empty() && layout_.ep == 1;
    if (!sized && job_.global_batch % (data * layout_.ep) != 0) return;
    over(
        "fsdp", !rules_.zero_stages.empty(), data,
        [&](int64_t shard, int64_t rest) {
          if (!job_.constraints.allow("dp", rest)) return;
          layout_.dp_shard = shard;
          layout_.dp_replicate = rest;
          layout();
        });
  }

  void layout() {
    cost::Strategy strategy;
    strategy.layout = layout_;
    strategy.global_batch = job_.global_batch;
    strategy.seq_len = job_.seq_len;
    strategy.precision = job_.precision;
    if (job_.precision == cluster::Precision::fp64)
      strategy.master = cluster::Precision::fp64;
    strategy.framework = job_.framework;
    auto orders = orders_of(job_, layout_);
    // On equal nodes MemoryFitter tries the other orders of what fits.
    if (!job_.cluster.mixed() && !orders.empty()) orders = {orders[0]};
    for (const int order : orders) {
      strategy.layout.order = axis_orders()[static_cast<size_t>(order)];
      choose_context(strategy);
      sequence_parallel(strategy);
    }
  }

  void choose_context(cost::Strategy& strategy) {
    if (layout_.cp == 1 || job_.framework != "echelon") return;
    const std::tuple key(layout_.tp, layout_.cp, strategy.layout.order);
    const auto [at, is_new] = contexts_.try_emplace(key);
    if (is_new) {
      const cost::Strategy open = cost::with_microbatch(strategy, 1);
      at->second =
          cost::choose_context_way(job_.model, open, job_.cluster).options;
    }
    strategy.context = at->second;
  }

  void choose_chunks(cost::Strategy& strategy) {
    if (layout_.tp == 1 || !job_.model.transformer) return;
    const std::tuple key(
        layout_.tp, layout_.cp, layout_.ep, strategy.layout.order,
        strategy.sequence_parallel, strategy.microbatch_size);
    const auto [at, is_new] = chunks_.try_emplace(key);
    strategy.product_chunks = 0;
    if (is_new) {
      at->second =
          cost::choose_product_chunks(job_.model, strategy, job_.cluster)
              .chunks;
    }
    strategy.product_chunks = at->second;
  }

  void sequence_parallel(cost::Strategy strategy) {
    const bool may = rules_.sequence_parallel && layout_.tp > 1 &&
                     job_.model.transformer.has_value();
    for (int64_t on = may && job_.coarse ? 1 : 0; on <= (may ? 1 : 0); ++on) {
      if (!job_.constraints.allow("sequence_parallel", on)) continue;
      strategy.sequence_parallel = on == 1;
      microbatches(strategy);
    }
  }

  void microbatches(const cost::Strategy& strategy) {
    if (job_.global_batch % strategy.data_ranks() == 0) {
      equal_microbatches(strategy);
    }
    const auto speeds = data_rank_speeds(job_, strategy);
    if (!speeds.empty()) sized_microbatches(strategy, speeds);
  }

  // Adds microbatches whose sizes are in proportion to the speed of the ranks'
  // devices.
  void sized_microbatches(
      cost::Strategy strategy, const std::vector<double>& speeds) {
    const auto ranks = static_cast<int64_t>(speeds.size());
    for (const int64_t count : divisors(job_.global_batch)) {
      const int64_t round = job_.global_batch / count;
      if (round < ranks) return;
      const bool half = (count & (count - 1)) == 0;
      if (round > kMostSmallMicrobatch * ranks && !half) continue;
      strategy.rank_microbatch = share_out(round, speeds);
      const auto [least, most] =
          std::ranges::minmax_element(strategy.rank_microbatch);
      if (*least == *most) continue;
      if (!job_.constraints.allow("microbatch", *most)) continue;
      if (!job_.constraints.allow("microbatches", count)) continue;
      strategy.microbatch_size = *most;
      choose_chunks(strategy);
      if (any_variant(strategy)) groups_.push_back(strategy);
    }
  }

  void equal_microbatches(cost::Strategy strategy) {
    // Ranks of ep have different samples too.
    const int64_t rank_batch = job_.global_batch / strategy.data_ranks();
    bool first = true;
    for (const int64_t size : microbatch_sizes(rank_batch)) {
      if (job_.coarse && (size & (size - 1)) != 0) continue;
      if (!job_.constraints.allow("microbatch", size)) continue;
      if (!job_.constraints.allow("microbatches", rank_batch / size)) continue;
      strategy.microbatch_size = size;
      choose_chunks(strategy);
      // If the most microbatches allow no variant, fewer allow none either.
      if (first && !any_variant(strategy)) return;
      first = false;
      groups_.push_back(strategy);
    }
  }

  bool any_variant(const cost::Strategy& group) {
    const auto& variants = variants_.like(group);
    return std::ranges::any_of(variants, [&](const auto& one) {
      return cost::check_strategy(
                 job_.model, with_microbatches(one, group), job_.cluster)
          .empty();
    });
  }

  const SearchJob& job_;
  FrameworkRules rules_;
  Layout layout_;
  VariantLists variants_;
  std::vector<cost::Strategy> groups_;
  /// By tp, cp and the order of the axes, which say where the ranks of cp are.
  std::map<std::tuple<int64_t, int64_t, AxisOrder>, ContextParallelOptions>
      contexts_;
  /// By tp, cp, ep, their order, sequence_parallel and the microbatch.
  std::map<
      std::tuple<int64_t, int64_t, int64_t, AxisOrder, bool, int64_t>, int64_t>
      chunks_;
};

std::vector<cost::Strategy> with_schedules(
    const SearchJob& job, const FrameworkRules& rules,
    const cost::Strategy& group) {
  if (group.layout.pp == 1) return {group};
  std::vector<cost::Strategy> variants;
  for (const ScheduleKind schedule : rules.schedules) {
    const bool usual = schedule == ScheduleKind::one_f_one_b ||
                       schedule == ScheduleKind::interleaved;
    if (job.coarse && !usual) continue;
    for (const int64_t stages :
         stages_per_rank(job.model, schedule, group.layout.pp)) {
      if (group.layout.pp * stages > most_stages(job.model)) continue;
      if (job.coarse && stages > 2 && stages != 4) continue;
      cost::Strategy variant = group;
      variant.schedule = schedule;
      variant.stages_per_rank = stages;
      variants.push_back(variant);
      if (group.layout.pp * stages > num_layers(job.model)) continue;
      for (auto& layers : sized_stages(job, variant)) {
        variant.stage_layers = std::move(layers);
        variants.push_back(variant);
      }
    }
  }
  return variants;
}

}  // namespace

FrameworkRules rules_of_framework(const std::string& framework) {
  // Megatron-LM of 2021: no distributed optimizer, no sequence parallelism.
  if (framework == "megatron-2021") {
    return {
        .context_parallel = false,
        .expert_parallel = false,
        .schedules =
            {ScheduleKind::gpipe, ScheduleKind::one_f_one_b,
             ScheduleKind::interleaved},
        .zero_stages = {},
        .orders = {1},
        .sequence_parallel = false};
  }
  if (framework.rfind("megatron", 0) == 0) {
    return {
        .schedules = {ScheduleKind::one_f_one_b, ScheduleKind::interleaved},
        .zero_stages = {1},
        .orders = {1}};
  }
  if (framework == "fsdp") {
    return {
        .context_parallel = false,
        .expert_parallel = false,
        .pipelines = false,
        .tensor_parallel = false,
        .schedules = {},
        .zero_stages = {2, 3},
        .orders = {0},
        .offload = true};
  }
  return {
      .schedules = {kScheduleKinds.begin(), kScheduleKinds.end()},
      .zero_stages = {1, 2, 3},
      .unshard_once = true,
      .orders = {0, 1, 2},
      .offload = true,
      .partial_selective = true};
}

std::vector<MemorySaver> list_savers(const SearchJob& job, bool offload) {
  const auto layers = asked_recompute_layers(job);
  const bool partial_selective =
      rules_of_framework(job.framework).partial_selective;
  std::vector<MemorySaver> savers;
  for (int64_t optimizer = 0; optimizer <= 1; ++optimizer) {
    for (int64_t activations = 0; activations <= 1; ++activations) {
      if (!offload && optimizer + activations > 0) continue;
      if (!job.constraints.allow("offload", optimizer)) continue;
      if (!job.constraints.allow("activations", activations)) continue;
      for (const cost::Recompute recompute : cost::kRecomputes) {
        const bool selective = recompute == cost::Recompute::selective;
        if (layers && recompute == cost::Recompute::none) continue;
        if (layers && selective && !partial_selective) continue;
        // Activations on the host need no recompute.
        if (activations == 1 && selective) continue;
        if (!job.constraints.allow(
                "recompute", static_cast<int64_t>(recompute))) {
          continue;
        }
        savers.push_back({optimizer == 1, activations == 1, recompute});
      }
    }
  }
  return savers;
}

std::optional<int64_t> asked_recompute_layers(const SearchJob& job) {
  for (const auto& fixed : job.constraints.fixed()) {
    if (fixed.key->name == "recompute_layers" && fixed.value >= 0) {
      return fixed.value;
    }
  }
  return {};
}

int64_t
layers_of_stage(const cost::ModelShape& model, const cost::Strategy& strategy) {
  if (!strategy.stage_layers.empty()) {
    return *std::ranges::max_element(strategy.stage_layers);
  }
  const int64_t stages =
      strategy.layout.pp * std::max<int64_t>(1, strategy.stages_per_rank);
  return (num_layers(model) + stages - 1) / stages;
}

bool has_strategy(const SearchJob& job) {
  if (list_savers(job, rules_of_framework(job.framework).offload).empty()) {
    return false;
  }
  const auto layers = asked_recompute_layers(job);
  const auto has_layers = [&](const cost::Strategy& variant) {
    return *layers < layers_of_stage(job.model, variant);
  };
  const auto groups = list_groups(job);
  if (!layers || groups.empty()) return !groups.empty();
  return *layers > 0 && std::ranges::any_of(groups, [&](const auto& group) {
    return std::ranges::any_of(list_variants(job, group), has_layers);
  });
}

std::vector<int64_t> divisors(int64_t number) {
  std::vector<int64_t> low;
  std::vector<int64_t> high;
  for (int64_t one = 1; one * one <= number; ++one) {
    if (number % one != 0) continue;
    low.push_back(one);
    if (one * one != number) high.push_back(number / one);
  }
  low.insert(low.end(), high.rbegin(), high.rend());
  return low;
}

int64_t num_layers(const cost::ModelShape& model) {
  return model.transformer ? model.transformer->layers
                           : static_cast<int64_t>(model.layers.size());
}

std::vector<int> orders_of(const SearchJob& job, const Layout& layout) {
  std::vector<int> allowed = rules_of_framework(job.framework).orders;
  std::erase_if(allowed, [&](int order) {
    return !job.constraints.allow("order", order);
  });
  return orders_that_differ(layout, allowed, job.cluster);
}

std::vector<cost::Strategy> list_groups(const SearchJob& job) {
  return Lister(job).run();
}

std::vector<cost::Strategy>
list_variants(const SearchJob& job, const cost::Strategy& group) {
  const FrameworkRules rules = rules_of_framework(job.framework);
  std::vector<cost::Strategy> variants;
  // Echelon's ranks of cp shard what those of fsdp do, wherever parameters are
  // in shards: also where they are used in another precision.
  const bool low = job.precision == cluster::Precision::bf16 ||
                   job.precision == cluster::Precision::fp16;
  const bool shards =
      group.layout.dp_shard > 1 ||
      (job.framework == "echelon" && group.layout.cp > 1 && low);
  for (cost::Strategy variant : with_schedules(job, rules, group)) {
    if (!shards) {
      variants.push_back(variant);
      continue;
    }
    for (const int stage : rules.zero_stages) {
      if (job.coarse && stage == 2 && rules.zero_stages.size() > 2) continue;
      variant.zero_stage = stage;
      for (const bool once : {false, true}) {
        if (once && (stage != 3 || !rules.unshard_once)) continue;
        variant.unshard_once = once;
        variants.push_back(variant);
      }
    }
  }
  // Savings of memory are chosen later.
  std::erase_if(variants, [&](const cost::Strategy& variant) {
    return !job.constraints.allow(
        variant, {"schedule", "stages_per_rank", "stage", "gather"});
  });
  return variants;
}

const std::vector<cost::Strategy>&
VariantLists::like(const cost::Strategy& group) {
  const Layout& layout = group.layout;
  const std::array<int64_t, 6> degrees = {layout.dp_replicate, layout.dp_shard,
                                          layout.tp,           layout.pp,
                                          layout.cp,           layout.ep};
  const auto [at, is_new] = lists_.try_emplace({degrees, group.layout.order});
  if (is_new) {
    cost::Strategy equal = group;
    equal.rank_microbatch.clear();
    at->second = list_variants(job_, equal);
  }
  return at->second;
}

std::vector<cost::Strategy> VariantLists::of(const cost::Strategy& group) {
  std::vector<cost::Strategy> variants;
  for (const cost::Strategy& one : like(group)) {
    variants.push_back(with_microbatches(one, group));
  }
  return variants;
}

}  // namespace echelon::planner
