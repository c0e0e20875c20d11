#include "echelon/explain/stage_costs.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "echelon/timeline/pipeline_blocks.h"

namespace echelon {
namespace {

struct Sum {
  double seconds = 0;
  double count = 0;
  void add(double value) {
    seconds += value;
    count += 1;
  }
  double mean() const { return count > 0 ? seconds / count : 0; }
};

struct Sums {
  std::map<std::pair<BlockKind, int32_t>, Sum> of_stage;  // kind, stage
  std::map<BlockKind, Sum> of_all;
  std::map<int32_t, std::vector<int>> ranks;  // by stage
};

int rank_of(const PipelineRow& row) {
  return std::stoi(row.name.substr(row.name.find(' ') + 1));  // "rank 3"
}

Sums sums_of(const std::vector<PipelineRows>& steps) {
  Sums sums;
  for (const PipelineRows& step : steps) {
    for (const PipelineBlock& block : step.blocks) {
      const double seconds = block.end - block.begin;
      sums.of_stage[{block.kind, block.stage}].add(seconds);
      sums.of_all[block.kind].add(seconds);
      auto& ranks = sums.ranks[block.stage];
      const int rank = rank_of(step.rows[static_cast<size_t>(block.row)]);
      if (std::ranges::find(ranks, rank) == ranks.end()) {
        ranks.push_back(rank);
      }
    }
  }
  return sums;
}

std::vector<double> by_stage(const Sums& sums) {
  std::vector<double> seconds;
  for (const auto& [place, sum] : sums.of_stage) {
    const auto stage = static_cast<size_t>(place.second);
    if (seconds.size() <= stage) seconds.resize(stage + 1, 0);
    seconds[stage] += sum.mean();
  }
  return seconds;
}

}  // namespace

std::optional<StageCosts>
stage_costs(const Timeline& timeline, const std::vector<int64_t>& steps) {
  std::vector<PipelineRows> passes;
  for (const int64_t step : steps) {
    PipelineRows rows = whole_passes(pipeline_rows(timeline, step));
    if (!rows.blocks.empty()) passes.push_back(std::move(rows));
  }
  if (passes.empty()) return {};
  const Sums sums = sums_of(passes);
  StageCosts costs;
  costs.seconds = by_stage(sums);
  double busy = 0;
  for (const PipelineRows& rows : passes) {
    const auto uneven = replayed(rows, [&](const PipelineBlock& block) {
      return sums.of_stage.at({block.kind, block.stage}).mean();
    });
    const auto even = replayed(rows, [&](const PipelineBlock& block) {
      return sums.of_all.at(block.kind).mean();
    });
    if (!uneven || !even) return {};
    const double weight = 1.0 / static_cast<double>(passes.size());
    costs.as_they_are += weight * makespan(*uneven);
    costs.even += weight * makespan(*even);
    busy += weight * (1 - bubble_fraction(*even, rows.rows.size()));
  }
  costs.busy_share = busy;
  const auto slowest = std::ranges::max_element(costs.seconds);
  const auto stage = static_cast<int32_t>(slowest - costs.seconds.begin());
  if (const auto found = sums.ranks.find(stage); found != sums.ranks.end()) {
    costs.slowest_ranks = found->second;
    std::ranges::sort(costs.slowest_ranks);
  }
  return costs;
}

}  // namespace echelon
