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

// Which axes a layout may have.
enum class AxesOf { job, trainer };

bool may_have(const Layout& old, Axis axis, AxesOf axes) {
  if (old.degree(axis) > 1) return true;
  return axes == AxesOf::trainer && axis != Axis::cp && axis != Axis::ep;
}

// Adds the layouts that differ in the axes from `next` on.
void add_layouts(
    const Layout& old, Layout layout, size_t next, int64_t ranks, AxesOf axes,
    std::vector<Layout>& all) {
  if (next < kModelAxes.size()) {
    const Axis axis = kModelAxes[next];
    const int64_t most = may_have(old, axis, axes) ? ranks : 1;
    for (int64_t degree = 1; degree <= most; ++degree) {
      if (ranks % degree != 0) continue;
      degree_of(layout, axis) = degree;
      add_layouts(old, layout, next + 1, ranks / degree, axes, all);
    }
    return;
  }
  if (axes == AxesOf::trainer) {
    for (int64_t shards = 1; shards <= ranks; ++shards) {
      if (ranks % shards != 0) continue;
      layout.dp_shard = shards;
      layout.dp_replicate = ranks / shards;
      all.push_back(layout);
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
  // Shards that stay, else all data-parallel ranks as before.
  const int shards = layout.dp_shard == old.dp_shard                ? 0
                     : old.dp_shard > 1 && layout.dp_replicate == 1 ? 1
                                                                    : 2;
  return std::tuple(axes, factor, layout.pp, layout.tp, shards);
}

// All layouts, the one that changes least first.
std::vector<Layout>
near_layouts(const Layout& old, int64_t num_ranks, AxesOf axes) {
  std::vector<Layout> all;
  add_layouts(old, old, 0, num_ranks, axes, all);
  std::ranges::stable_sort(
      all, {}, [&](const Layout& layout) { return change(old, layout); });
  return all;
}

// The rule that it breaks; empty: none.
std::string broken_rule(
    const Job& job, const Layout& layout, int64_t num_ranks,
    const DataFacts& data) {
  Job other = job;
  other.layout = layout;
  try {
    check_job(other, num_ranks, data);
    return "";
  } catch (const ConfigError& error) {
    return format("{}: {}", to_string(layout), error.what());
  }
}

// The rule that the nearest layout breaks, where none is accepted.
std::optional<Layout> find_layout(
    const Job& job, int64_t num_ranks, const DataFacts& data,
    std::string& rule) {
  for (const Layout& layout :
       near_layouts(job.layout, num_ranks, AxesOf::job)) {
    const std::string broken = broken_rule(job, layout, num_ranks, data);
    if (broken.empty()) return layout;
    if (rule.empty()) rule = broken;
  }
  return std::nullopt;
}

}  // namespace

std::vector<Layout>
layouts_on(const Job& job, int64_t num_ranks, const DataFacts& data) {
  std::vector<Layout> all =
      near_layouts(job.layout, num_ranks, AxesOf::trainer);
  std::erase_if(all, [&](const Layout& layout) {
    return !broken_rule(job, layout, num_ranks, data).empty();
  });
  return all;
}

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
