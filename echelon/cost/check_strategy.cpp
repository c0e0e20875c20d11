#include "echelon/cost/step_estimate.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "echelon/cost/stage_cut.h"
#include "echelon/error.h"
#include "echelon/schedule/options.h"
#include "echelon/text/nearest.h"

namespace echelon {
namespace {

std::string text(int64_t value) {
  return std::to_string(value);
}

// "1, 2, 4 and 8", the first dozen.
std::string list(const std::vector<int64_t>& values) {
  std::string all;
  const size_t shown = std::min<size_t>(values.size(), 12);
  for (size_t i = 0; i < shown; ++i) {
    if (i > 0) all += i + 1 == values.size() ? " and " : ", ";
    all += text(values[i]);
  }
  return all + (shown < values.size() ? ", …" : "");
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
  return std::string(axis) + "=" + text(degree) + " does not divide " +
         text(value) + " " + what + "; " + list(divisors(value)) + " do";
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
    if (value < 1)
      return std::string(name) + "=" + text(value) + "; it must be 1 or more";
  }
  if (strategy.seq_len < 0 || strategy.stages_per_rank < 0) {
    return "seq_len and stages_per_rank must be 0 or more";
  }
  if (strategy.zero_stage < 0 || strategy.zero_stage > 3) {
    return "zero_stage=" + text(strategy.zero_stage) +
           "; there are 0, 1, 2 and 3";
  }
  return {};
}

std::string check_ranks(const Strategy& strategy, const Cluster& cluster) {
  const int64_t ranks = strategy.layout.num_ranks();
  const int64_t devices = cluster.num_devices();
  if (ranks <= devices) return {};
  return to_string(strategy.layout) + " are " + text(ranks) + " ranks, but " +
         (cluster.name.empty() ? "the cluster" : cluster.name) + " has " +
         text(devices) + " devices";
}

std::string numbers(const std::vector<int64_t>& values) {
  std::string all;
  for (size_t i = 0; i < values.size() && i < 12; ++i) {
    all += (i > 0 ? ", " : "") + text(values[i]);
  }
  return all + (values.size() > 12 ? ", …" : "");
}

// Of data-parallel ranks that take batches of different sizes.
std::string check_rank_batches(const Strategy& strategy) {
  const auto& sizes = strategy.rank_microbatch;
  const auto entries = static_cast<int64_t>(sizes.size());
  if (strategy.layout.ep > 1 || entries != strategy.layout.data_degree()) {
    return "there are " + text(entries) + " sizes of microbatches for " +
           text(strategy.data_ranks()) +
           " data-parallel ranks; there must be one "
           "for each of dp * fsdp, with ep=1";
  }
  const auto [least, most] = std::minmax_element(sizes.begin(), sizes.end());
  if (*least < 1 || *most != strategy.microbatch_size) {
    return "microbatches of " + numbers(sizes) +
           " samples: each must be 1 or more, and microbatch_size=" +
           text(strategy.microbatch_size) + " the largest";
  }
  if (strategy.global_batch % strategy.round_samples() == 0) return {};
  return "batch " + text(strategy.global_batch) +
         " does not divide into microbatches of " + numbers(sizes) + " samples";
}

std::string check_batch(const Strategy& strategy) {
  if (!strategy.rank_microbatch.empty()) return check_rank_batches(strategy);
  const int64_t data = strategy.data_ranks();
  const int64_t each = data * strategy.microbatch_size;
  if (strategy.global_batch % each == 0) return {};
  const int64_t below = strategy.global_batch / each * each;
  const std::string near =
      below > 0 ? text(below) + " or " + text(below + each) : text(each);
  return "batch " + text(strategy.global_batch) + " does not divide over " +
         text(data) + " data-parallel ranks in microbatches of " +
         text(strategy.microbatch_size) + "; a batch of " + near + " does";
}

std::string check_transformer(
    const TransformerShape& shape, int64_t seq, const Strategy& strategy) {
  const Layout& layout = strategy.layout;
  std::string problem = divides("tp", layout.tp, shape.heads, "heads");
  if (problem.empty() && !shape.latent && layout.tp > shape.key_value_heads() &&
      layout.tp % shape.key_value_heads() != 0) {
    problem = "tp=" + text(layout.tp) + " is no multiple of the " +
              text(shape.key_value_heads()) + " heads of keys and values";
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
                  ? "ep=" + text(layout.ep) +
                        ", but the model has no experts; take ep=1"
                  : divides("ep", layout.ep, shape.experts.experts, "experts");
  }
  return problem;
}

std::string check_convolutions(const Strategy& strategy) {
  const Layout& layout = strategy.layout;
  if (layout.cp > 1)
    return "cp=" + text(layout.cp) + ", but images have no sequence; take cp=1";
  if (layout.ep > 1)
    return "ep=" + text(layout.ep) +
           ", but the model has no experts; take ep=1";
  if (layout.tp > 1) {
    return "tp=" + text(layout.tp) +
           ", but what ranks of tp compute and send is known of transformers "
           "alone; "
           "take tp=1";
  }
  return {};
}

std::string stages_text(int64_t each) {
  return text(each) + (each == 1 ? " stage" : " stages") + " per rank";
}

std::string check_schedule(const ModelShape& model, const Strategy& strategy) {
  if (strategy.layout.pp == 1) return {};
  const auto& kinds = schedule_kinds();
  if (std::find(kinds.begin(), kinds.end(), strategy.schedule) == kinds.end()) {
    return "schedule \"" + strategy.schedule + "\" is not known" +
           config::did_you_mean(strategy.schedule, kinds);
  }
  const int64_t p = strategy.layout.pp, m = strategy.num_microbatches();
  const int64_t each = num_stages(strategy) / p;
  const bool two = is_v_shaped(strategy);
  const bool many = strategy.schedule == "interleaved" ||
                    strategy.schedule == "breadth_first";
  if (!many && each != (two ? 2 : 1)) {
    return "schedule " + strategy.schedule + " has " +
           stages_text(two ? 2 : 1) + ", not " + text(each);
  }
  const int64_t layers = model.transformer
                             ? model.transformer->layers
                             : static_cast<int64_t>(model.layers.size());
  // A transformer's embedding and head may be stages of their own.
  const int64_t most = layers + (model.transformer ? 2 : 0);
  if (p * each > most) {
    return "pp=" + text(p) + " with " + stages_text(each) +
           " cuts the model into " + text(p * each) + " stages, but it has " +
           text(layers) + " layers" +
           (model.transformer ? ", an embedding and a head" : "") +
           "; take pp=" + text(std::max<int64_t>(1, most / each)) + " or less";
  }
  if (!strategy.stage_layers.empty()) {
    const auto& counts = strategy.stage_layers;
    const bool all =
        std::accumulate(counts.begin(), counts.end(), int64_t{0}) == layers;
    const bool some = std::all_of(
        counts.begin(), counts.end(), [](int64_t count) { return count > 0; });
    if (!all || !some || static_cast<int64_t>(counts.size()) != p * each) {
      return "stages of " + numbers(counts) + " layers: they must be " +
             text(p * each) + ", each of 1 or more, and sum to " + text(layers);
    }
  }
  if (strategy.schedule == "interleaved" && m % p != 0) {
    return "schedule interleaved: " + text(m) +
           " microbatches are no multiple of pp=" + text(p) +
           "; take 1f1b, or " + text((m + p - 1) / p * p);
  }
  if (strategy.schedule == "dualpipev" && m < 2 * p) {
    return "schedule dualpipev: " + text(m) +
           " microbatches, but pp=" + text(p) + " needs " + text(2 * p) +
           " or more";
  }
  return {};
}

}  // namespace

std::string check_strategy(
    const ModelShape& model, const Strategy& strategy, const Cluster& cluster) {
  std::string problem = check_numbers(strategy);
  if (problem.empty()) problem = check_ranks(strategy, cluster);
  if (problem.empty()) problem = check_batch(strategy);
  if (problem.empty()) {
    problem = model.transformer
                  ? check_transformer(
                        *model.transformer,
                        strategy.seq_len > 0 ? strategy.seq_len : model.seq_len,
                        strategy)
                  : check_convolutions(strategy);
  }
  if (problem.empty()) problem = check_schedule(model, strategy);
  return problem;
}

}  // namespace echelon
