#include "echelon/job/resize.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "echelon/error.h"
#include "echelon/job/check_job.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon {
namespace {

// The axes of which the model's layers know.
constexpr std::array<Axis, 4> kModelAxes = {
    Axis::pp, Axis::cp, Axis::ep, Axis::tp};

int64_t& degree_of(Layout& layout, Axis axis) {
  switch (axis) {
    case Axis::dp_replicate:
      return layout.dp_replicate;
    case Axis::dp_shard:
      return layout.dp_shard;
    case Axis::pp:
      return layout.pp;
    case Axis::cp:
      return layout.cp;
    case Axis::ep:
      return layout.ep;
    case Axis::tp:
      return layout.tp;
  }
  return layout.tp;
}

// Adds the layouts that differ in the axes from `next` on.
void add_layouts(
    const Layout& old, Layout layout, size_t next, int64_t ranks,
    std::vector<Layout>& all) {
  if (next < kModelAxes.size()) {
    const Axis axis = kModelAxes[next];
    const int64_t most = old.degree(axis) > 1 ? ranks : 1;
    for (int64_t degree = 1; degree <= most; ++degree) {
      if (ranks % degree != 0) continue;
      degree_of(layout, axis) = degree;
      add_layouts(old, layout, next + 1, ranks / degree, all);
    }
    return;
  }
  // What is left is data parallel: shards as before where they divide it, with
  // more or fewer replicas.
  if (old.dp_shard > 1 && old.dp_replicate > 1 && ranks % old.dp_shard == 0) {
    layout.dp_shard = old.dp_shard;
    layout.dp_replicate = ranks / old.dp_shard;
    all.push_back(layout);
  }
  layout.dp_shard = old.dp_shard > 1 ? ranks : 1;
  layout.dp_replicate = old.dp_shard > 1 ? 1 : ranks;
  all.push_back(layout);
}

auto change(const Layout& old, const Layout& layout) {
  int axes = 0;
  double factor = 0;
  for (const Axis axis : kModelAxes) {
    const double ratio = static_cast<double>(layout.degree(axis)) /
                         static_cast<double>(old.degree(axis));
    axes += ratio != 1 ? 1 : 0;
    factor += std::abs(std::log(ratio));
  }
  const int replicas = layout.dp_shard != old.dp_shard ? 1 : 0;
  return std::tuple(axes, factor, layout.pp, layout.tp, replicas);
}

// The rule that the nearest layout breaks, where none is accepted.
std::optional<Layout> find_layout(
    const Job& job, int64_t num_ranks, const DataFacts& data,
    std::string& rule) {
  std::vector<Layout> all;
  add_layouts(job.layout, job.layout, 0, num_ranks, all);
  std::ranges::stable_sort(all, {}, [&](const Layout& layout) {
    return change(job.layout, layout);
  });
  for (const Layout& layout : all) {
    Job other = job;
    other.layout = layout;
    try {
      check_job(other, num_ranks, data);
      return layout;
    } catch (const ConfigError& error) {
      if (rule.empty()) {
        rule = format("{}: {}", to_string(layout), error.what());
      }
    }
  }
  return std::nullopt;
}

}  // namespace

Layout layout_on(const Job& job, int64_t num_ranks, const DataFacts& data) {
  std::string rule;
  if (const auto layout = find_layout(job, num_ranks, data, rule)) {
    return *layout;
  }
  const auto nearest = [&](int64_t step) -> int64_t {
    std::string ignored;
    const int64_t most = 2 * std::max(num_ranks, job.layout.num_ranks());
    for (int64_t n = num_ranks + step; n >= 1 && n <= most; n += step) {
      if (find_layout(job, n, data, ignored)) return n;
    }
    return 0;
  };
  std::string others;
  for (const int64_t n : {nearest(-1), nearest(+1)}) {
    if (n > 0) others += (others.empty() ? "" : " and ") + std::to_string(n);
  }
  throw ConfigError(format(
      "no layout of {} fits; {}{}", counted(num_ranks, "rank"), rule,
      others.empty() ? "" : format("\n{} fit", others)));
}

}  // namespace echelon
