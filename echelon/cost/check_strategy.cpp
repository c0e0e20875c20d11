#include "echelon/cost/step_estimate.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <vector>

#include "echelon/cost/strategy.h"
#include "echelon/error.h"
#include "echelon/schedule/options.h"
#include "echelon/text/format.h"
#include "echelon/text/nearest.h"
#include "echelon/text/units.h"

namespace echelon::cost {
namespace {

// "1, 2, 4, 8", the first dozen; `last` stands before the last of all.
std::string
numbers(const std::vector<int64_t>& values, const char* last = ", ") {
  if (values.size() > 12) {
    return join(std::span(values).first(12), ", ") + ", …";
  }
  if (values.size() < 2) return join(values, ", ");
  return format(
      "{}{}{}", join(std::span(values).first(values.size() - 1), ", "), last,
      values.back());
}

std::vector<int64_t> divisors(int64_t value) {
  std::vector<int64_t> all;
  for (int64_t i = 1; i <= value && i <= 4096; ++i) {
    if (value % i == 0) all.push_back(i);
  }
  return all;
}

std::string divides(
    const char* axis, int64_t degree, int64_t value, const std::string& what) {
  if (value % degree == 0) return {};
  return format(
      "{}={} does not divide {} {}; {} do", axis, degree, value, what,
      numbers(divisors(value), " and "));
}

std::string check_numbers(const Strategy& strategy) {
  const std::pair<const char*, int64_t> positive[] = {
      {"dp_replicate", strategy.layout.dp_replicate},
      {"dp_shard", strategy.layout.dp_shard},
      {"pp", strategy.layout.pp},
      {"cp", strategy.layout.cp},
      {"ep", strategy.layout.ep},
      {"tp", strategy.layout.tp},
      {"global_batch", strategy.global_batch},
      {"microbatch_size", strategy.microbatch_size}};
  for (const auto& [name, value] : positive) {
    if (value < 1) return format("{}={}; it must be 1 or more", name, value);
  }
  if (strategy.seq_len < 0 || strategy.stages_per_rank < 0) {
    return "seq_len and stages_per_rank must be 0 or more";
  }
  if (strategy.zero_stage < 0 || strategy.zero_stage > 3) {
    return format(
        "zero_stage={}; there are 0, 1, 2 and 3", strategy.zero_stage);
  }
  return {};
}

std::string
check_ranks(const Strategy& strategy, const cluster::Cluster& cluster) {
  const int64_t ranks = strategy.layout.num_ranks();
  const int64_t devices = cluster.num_devices();
  if (ranks <= devices) return {};
  return format(
      "{} are {}, but {} has {}", to_string(strategy.layout),
      counted(ranks, "rank"),
      cluster.name.empty() ? "the cluster" : cluster.name,
      counted(devices, "device"));
}

// The check of [train] rank_batch: data-parallel ranks that take batches of
// different sizes.
std::string check_rank_batches(const Strategy& strategy) {
  const auto& sizes = strategy.rank_microbatch;
  const auto entries = static_cast<int64_t>(sizes.size());
  if (strategy.layout.ep > 1 || entries != strategy.layout.data_degree()) {
    return format(
        "there are {} sizes of microbatches for {} data-parallel ranks; there "
        "must be one for each of dp * fsdp, with ep=1",
        entries, strategy.data_ranks());
  }
  const auto [least, most] = std::minmax_element(sizes.begin(), sizes.end());
  if (*least < 1 || *most != strategy.microbatch_size) {
    return format(
        "microbatches of {} samples: each must be 1 or more, and "
        "microbatch_size={} the largest",
        numbers(sizes), strategy.microbatch_size);
  }
  if (strategy.global_batch % strategy.round_samples() == 0) return {};
  return format(
      "batch {} does not divide into microbatches of {} samples",
      strategy.global_batch, numbers(sizes));
}

std::string check_batch(const Strategy& strategy) {
  if (!strategy.rank_microbatch.empty()) return check_rank_batches(strategy);
  const int64_t data = strategy.data_ranks();
  const int64_t each = data * strategy.microbatch_size;
  if (strategy.global_batch % each == 0) return {};
  const int64_t below = strategy.global_batch / each * each;
  return format(
      "batch {} does not divide over {} in microbatches of "
      "{}; a batch of {}{} does",
      strategy.global_batch, counted(data, "data-parallel rank"),
      strategy.microbatch_size, below > 0 ? format("{} or ", below) : "",
      below + each);
}

std::string no_experts(const Layout& layout) {
  return format("ep={}, but the model has no experts; take ep=1", layout.ep);
}

std::string check_transformer(
    const TransformerShape& shape, int64_t seq, const Strategy& strategy) {
  const Layout& layout = strategy.layout;
  std::string problem = divides("tp", layout.tp, shape.heads, "heads");
  if (problem.empty() && !shape.latent && layout.tp > shape.key_value_heads() &&
      layout.tp % shape.key_value_heads() != 0) {
    problem = format(
        "tp={} is no multiple of the {} heads of keys and values", layout.tp,
        shape.key_value_heads());
  }
  if (problem.empty()) {
    problem = divides("cp", layout.cp, seq, "tokens of a sequence");
  }
  if (problem.empty() && strategy.sequence_parallel) {
    problem = divides(
        "tp", layout.tp, seq / layout.cp,
        "tokens of a rank with sequence parallelism");
  }
  if (problem.empty() && layout.ep > 1) {
    problem = shape.experts.experts == 0
                  ? no_experts(layout)
                  : divides("ep", layout.ep, shape.experts.experts, "experts");
  }
  return problem;
}

std::string
check_convolutions(const ModelShape& model, const Strategy& strategy) {
  const Layout& layout = strategy.layout;
  if (layout.cp > 1) {
    return format("cp={}, but images have no sequence; take cp=1", layout.cp);
  }
  if (layout.ep > 1) return no_experts(layout);
  if (layout.tp == model.layer_ranks) return {};
  if (model.layer_ranks > 1) {
    return format(
        "tp={}, but the layers were counted for tp={}; count them again",
        layout.tp, model.layer_ranks);
  }
  return format(
      "tp={}, but what ranks of tp compute and send is known of transformers "
      "and counted layers alone; take tp=1, or count them with this layout",
      layout.tp);
}

std::string stages_text(int64_t each) {
  return counted(each, "stage") + " per rank";
}

std::string check_schedule(const ModelShape& model, const Strategy& strategy) {
  if (strategy.layout.pp == 1) return {};
  const int64_t p = strategy.layout.pp, m = strategy.num_microbatches();
  const int64_t each = num_stages(strategy) / p;
  const bool two = is_v_shaped(strategy.schedule);
  if (!takes_any_stages(strategy.schedule) && each != (two ? 2 : 1)) {
    return format(
        "schedule {} has {}, not {}", to_string(strategy.schedule),
        stages_text(two ? 2 : 1), each);
  }
  const int64_t layers = model.transformer
                             ? model.transformer->layers
                             : static_cast<int64_t>(model.layers.size());
  // A transformer's embedding and head may be stages of their own.
  const int64_t most = layers + (model.transformer ? 2 : 0);
  if (p * each > most) {
    return format(
        "pp={} with {} partitions the model into {}, but it has {}{}; take "
        "pp={} or less",
        p, stages_text(each), counted(p * each, "stage"),
        counted(layers, "layer"),
        model.transformer ? ", an embedding and a head" : "",
        std::max<int64_t>(1, most / each));
  }
  if (!strategy.stage_layers.empty()) {
    const auto& counts = strategy.stage_layers;
    const bool all =
        std::accumulate(counts.begin(), counts.end(), int64_t{0}) == layers;
    const bool some = std::all_of(
        counts.begin(), counts.end(), [](int64_t count) { return count > 0; });
    if (!all || !some || static_cast<int64_t>(counts.size()) != p * each) {
      return format(
          "stages of {} layers: they must be {}, each of 1 or more, and sum to "
          "{}",
          numbers(counts), p * each, layers);
    }
  }
  if (strategy.schedule == ScheduleKind::interleaved && m % p != 0) {
    return format(
        "schedule interleaved: {} microbatches are no multiple of pp={}; take "
        "1f1b, or {}",
        m, p, (m + p - 1) / p * p);
  }
  if (strategy.schedule == ScheduleKind::dualpipev && m < 2 * p) {
    return format(
        "schedule dualpipev: {} microbatches, but pp={} needs {} or more", m, p,
        2 * p);
  }
  return {};
}

}  // namespace

std::string check_strategy(
    const ModelShape& model, const Strategy& strategy,
    const cluster::Cluster& cluster) {
  std::string problem = check_numbers(strategy);
  if (problem.empty()) problem = check_ranks(strategy, cluster);
  if (problem.empty()) problem = check_batch(strategy);
  if (problem.empty()) {
    problem = model.transformer
                  ? check_transformer(
                        *model.transformer, strategy.seq_len_or(model.seq_len),
                        strategy)
                  : check_convolutions(model, strategy);
  }
  if (problem.empty()) problem = check_schedule(model, strategy);
  return problem;
}

}  // namespace echelon::cost
