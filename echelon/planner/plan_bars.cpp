#include "echelon/planner/plan_bars.h"

#include <algorithm>
#include <array>

#include "echelon/planner/reasons.h"
#include "echelon/report/stacked_bars.h"
#include "echelon/text/units.h"

namespace echelon {
namespace {

constexpr double kMostOverLimit = 1.6;  // longer bars are cut off
constexpr size_t kMostRanks = 8;        // of a pipeline that are shown

// One pipeline rank's.
StackedRow memory_row(
    const std::string& name, const MemoryEstimate& estimate, size_t rank) {
  const MemoryByKind& memory = estimate.ranks[rank];
  const double reserved = estimate.reserved_bytes;
  constexpr std::array<const char*, 7> colors = {"mp", "mg", "mo", "ma",
                                                 "mu", "mc", "mw"};
  StackedRow row{name, {}, {}, estimate.limit(rank)};
  for (size_t i = 0; i < kMemoryKinds.size(); ++i) {
    const double bytes = static_cast<double>(memory[kMemoryKinds[i]]);
    row.parts.push_back(
        {colors[i], std::string(to_string(kMemoryKinds[i])), bytes,
         format_bytes(bytes)});
  }
  row.parts.push_back({"idle", "reserved", reserved, format_bytes(reserved)});
  row.total = format_bytes(row.sum());
  return row;
}

StackedRow fullest_row(const std::string& name, const Plan& plan) {
  const auto& memory = plan.step.memory;
  return memory_row(name, memory, static_cast<size_t>(memory.fullest()));
}

std::string short_name(const Plan& plan) {
  return to_string(plan.strategy.layout);
}

// Each pipeline rank, or some of many.
void add_pipeline_rows(
    const std::string& name, const Plan& plan, StackedBars& bars) {
  const auto& memory = plan.step.memory;
  const size_t ranks = memory.ranks.size();
  const size_t shown = std::min(ranks, kMostRanks);
  for (size_t i = 0; i < shown; ++i) {
    const size_t rank = shown < 2 ? 0 : i * (ranks - 1) / (shown - 1);
    bars.rows.push_back(memory_row(
        ranks == 1 ? name + ": " + short_name(plan)
                   : name + ", pipeline rank " + std::to_string(rank),
        memory, rank));
  }
}

}  // namespace

void draw_memory_bars(
    Markup& page, const PlanRequest& request, const PlanResult& result) {
  StackedBars bars{
      .id = "memory",
      .title = "By kind, against what a job may use",
      .description = "What the devices of each plan hold, by kind.",
      .rows = {},
      .limit = usable_device_bytes(request.cluster),
      .limit_name = {}};
  bars.limit_name = format_bytes(bars.limit) + " for a job";
  const bool fits = !result.plans.empty();
  add_pipeline_rows(
      fits ? "the best" : "the closest",
      fits ? result.plans.front() : *result.closest, bars);
  for (size_t i = 1; i < result.plans.size(); ++i) {
    bars.rows.push_back(fullest_row(
        "no. " + std::to_string(i + 1) + ": " + short_name(result.plans[i]),
        result.plans[i]));
  }
  for (const auto& other : result.others) {
    if (!other.plan || other.plan->step.memory.ranks.empty()) continue;
    if (other.name.rfind("the runner-up", 0) == 0) continue;
    bars.rows.push_back(fullest_row(other.name, *other.plan));
  }
  if (!fits && result.smallest) {
    bars.rows.push_back(fullest_row(
        format_count(static_cast<double>(result.smallest->devices)) +
            " devices: " + short_name(*result.smallest),
        *result.smallest));
  }
  double limit = bars.limit;
  for (const auto& row : bars.rows) limit = std::max(limit, row.limit);
  double most = limit;
  for (const auto& row : bars.rows) most = std::max(most, row.sum());
  bars.whole = std::min(most, kMostOverLimit * limit);
  for (auto& row : bars.rows) {
    if (row.sum() > bars.whole) row.total += ", cut off here";
  }
  draw_stacked_bars(page, bars);
}

void draw_part_bars(
    Markup& page, const PlanRequest&, const PlanResult& result) {
  StackedBars bars{
      .id = "parts",
      .title = "What the steps of the best layouts are spent on",
      .description = "The time of a step by what it is spent on.",
      .rows = {},
      .limit_name = {}};
  for (const auto& plan : result.plans) {
    const StepParts& parts = plan.step.parts;
    double communication = 0;
    for (const double seconds : parts.exposed) communication += seconds;
    StackedRow row{
        short_name(plan),
        format_seconds(plan.step.step_seconds),
        {{"bw", "matrix products", parts.matrix, {}},
         {"fw", "memory-bound operators", parts.memory, {}},
         {"da", "computed again", parts.recompute, {}},
         {"ex", "communication not hidden", communication, {}},
         {"idle", "bubble", parts.bubble, {}},
         {"op", "optimizer", parts.optimizer, {}},
         {"ot", "other", parts.other, {}}},
        0};
    for (auto& part : row.parts) part.text = format_seconds(part.value);
    bars.rows.push_back(row);
  }
  draw_stacked_bars(page, bars);
}

}  // namespace echelon
