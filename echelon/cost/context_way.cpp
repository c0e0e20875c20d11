#include "echelon/cost/context_way.h"

#include <algorithm>
#include <vector>

#include "echelon/cost/choices.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::cost {
namespace {

std::string name_of(const ContextParallelOptions& options) {
  const std::string way = to_string(options.way);
  return options.ulysses > 0 ? format("{} of {}", way, options.ulysses) : way;
}

std::vector<ContextParallelOptions>
candidates_of(const ContextParallelOptions& asked, int64_t cp, int64_t heads) {
  std::vector<ContextParallelOptions> all;
  if (asked.way == ContextWay::automatic) {
    all.push_back({ContextWay::ring});
    all.push_back({ContextWay::all_gather});
    if (cp <= heads) all.push_back({ContextWay::ulysses});
  }
  for (int64_t ranks = 2; ranks < cp && ranks <= heads; ++ranks) {
    if (cp % ranks == 0) all.push_back({ContextWay::ulysses_ring, ranks});
  }
  // Groups of one rank are a ring.
  if (all.empty()) all.push_back({ContextWay::ring});
  return all;
}

}  // namespace

ContextWayChoice choose_context_way(
    const ModelShape& model, const Strategy& strategy,
    const cluster::Cluster& cluster) {
  const int64_t cp = strategy.layout.cp;
  if (cp == 1 || !is_open(strategy.context)) return {strategy.context, ""};
  const int64_t heads = model.transformer->heads / strategy.layout.tp;
  const auto all = candidates_of(strategy.context, cp, heads);
  std::vector<OpenWay> ways;
  Strategy tried = strategy;
  for (const ContextParallelOptions& one : all) {
    tried.context = one;
    ways.push_back({name_of(one), block_seconds(model, tried, cluster)});
  }
  const auto [best, why] = cheapest(
      ways, format(
                "sequences of {} and {} on {}",
                counted(strategy.seq_len_or(model.seq_len), "token"),
                counted(heads, "head"), cluster.name));
  return {.options = all.at(best), .why = why};
}

}  // namespace echelon::cost
