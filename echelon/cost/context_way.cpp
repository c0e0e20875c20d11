#include "echelon/cost/context_way.h"

#include <algorithm>
#include <vector>

#include "echelon/cost/choices.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::cost {
namespace {

constexpr double kEqual = 1.01;

struct Candidate {
  ContextParallelOptions options;
  double seconds = 0;
};

std::string name_of(const ContextParallelOptions& options) {
  const std::string way = to_string(options.way);
  return options.ulysses > 0 ? format("{} of {}", way, options.ulysses) : way;
}

std::vector<Candidate>
candidates_of(const ContextParallelOptions& asked, int64_t cp, int64_t heads) {
  std::vector<Candidate> all;
  if (asked.way == ContextWay::automatic) {
    all.push_back({{ContextWay::ring}});
    all.push_back({{ContextWay::all_gather}});
    if (cp <= heads) all.push_back({{ContextWay::ulysses}});
  }
  for (int64_t ranks = 2; ranks < cp && ranks <= heads; ++ranks) {
    if (cp % ranks == 0) all.push_back({{ContextWay::ulysses_ring, ranks}});
  }
  // Groups of one rank are a ring.
  if (all.empty()) all.push_back({{ContextWay::ring}});
  return all;
}

}  // namespace

ContextWayChoice choose_context_way(
    const ModelShape& model, const Strategy& strategy,
    const cluster::Cluster& cluster) {
  const int64_t cp = strategy.layout.cp;
  if (cp == 1 || !is_open(strategy.context)) return {strategy.context, ""};
  const int64_t heads = model.transformer->heads / strategy.layout.tp;
  auto all = candidates_of(strategy.context, cp, heads);
  Strategy tried = strategy;
  for (Candidate& one : all) {
    tried.context = one.options;
    one.seconds = block_seconds(model, tried, cluster);
  }
  const double least =
      std::ranges::min_element(all, {}, &Candidate::seconds)->seconds;
  const auto best = std::ranges::find_if(
      all, [&](const Candidate& one) { return one.seconds <= kEqual * least; });
  ContextWayChoice choice{.options = best->options, .why = ""};
  choice.why = format(
      "{}: {} a layer by the cost model, for sequences of {} and {} on {}",
      name_of(best->options), format_seconds(best->seconds),
      counted(strategy.seq_len_or(model.seq_len), "token"),
      counted(heads, "head"), cluster.name);
  const char* before = "; ";
  for (const Candidate& one : all) {
    if (one.options == best->options) continue;
    choice.why += format(
        "{}{} {}", before, name_of(one.options), format_seconds(one.seconds));
    before = ", ";
  }
  return choice;
}

}  // namespace echelon::cost
