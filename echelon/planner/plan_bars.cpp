#include "echelon/planner/plan_bars.h"

#include <algorithm>
#include <array>

#include "echelon/planner/reasons.h"
#include "echelon/timeline/page.h"
#include "echelon/timeline/units.h"

namespace echelon {
namespace {

constexpr double kMostOverLimit = 1.6;  // longer bars are cut off
constexpr int kRowHeight = 34;
constexpr size_t kMostRanks = 8;  // of a pipeline that are shown

struct Part {
  const char* color;
  std::string name;
  double value = 0;
  std::string text;
};

struct Row {
  std::string name;
  std::string total;
  std::vector<Part> parts;
};

struct Bars {
  std::string id, title, description;
  std::vector<Row> rows;
  double whole = 1;  // what the width stands for
  double limit = 0;  // a vertical line; 0: none
  std::string limit_name;
};

double sum_of(const Row& row) {
  double sum = 0;
  for (const auto& part : row.parts) sum += part.value;
  return sum;
}

void draw_row(Markup& page, const Bars& bars, const Row& row, int top) {
  const std::string y = std::to_string(top);
  page.leaf("text", {{"class", "name"}, {"x", "0"}, {"y", y}}, row.name);
  page.leaf(
      "text",
      {{"class", "share"}, {"x", "100%"}, {"y", y}, {"text-anchor", "end"}},
      row.total);
  double x = 0;
  for (const auto& part : row.parts) {
    const double begin = std::min(1.0, x / bars.whole);
    x += part.value;
    const double width = std::min(1.0, x / bars.whole) - begin;
    if (width < 0.0005) continue;
    page.open(
        "rect",
        {{"class", part.color},
         {"x", coordinate(100 * begin) + "%"},
         {"y", std::to_string(top + 5)},
         {"width", coordinate(100 * width) + "%"},
         {"height", "13"}});
    page.leaf("title", {}, row.name + ": " + part.name + " " + part.text).close();
  }
}

std::vector<Part> kinds_of(const Bars& bars) {
  std::vector<Part> kinds;
  for (const auto& row : bars.rows) {
    for (const auto& part : row.parts) {
      const bool known = std::any_of(
          kinds.begin(), kinds.end(),
          [&](const Part& kind) { return kind.name == part.name; });
      if (!known && part.value > 0.002 * bars.whole) kinds.push_back(part);
    }
  }
  return kinds;
}

void draw(Markup& page, const Bars& bars) {
  page.open("figure", {{"class", "chart"}, {"id", bars.id}});
  page.open("figcaption").leaf("h3", {}, bars.title);
  page.open("span", {{"class", "keys"}});
  for (const auto& kind : kinds_of(bars)) {
    draw_key(page, kind.color, kind.name.c_str());
  }
  page.close().close();
  const int top = bars.limit > 0 ? 34 : 14;
  const int height = top + kRowHeight * static_cast<int>(bars.rows.size());
  page.open(
      "svg",
      {{"width", "100%"}, {"height", std::to_string(height)}, {"role", "img"},
       {"aria-label", bars.description}});
  int y = top;
  for (const auto& row : bars.rows) {
    draw_row(page, bars, row, y);
    y += kRowHeight;
  }
  if (bars.limit > 0) {
    const std::string x = coordinate(100 * bars.limit / bars.whole) + "%";
    page.empty(
        "line",
        {{"class", "level limit"}, {"x1", x}, {"x2", x}, {"y1", "16"},
         {"y2", std::to_string(height - 10)}});
    page.leaf(
        "text",
        {{"class", "level-name"}, {"x", x}, {"y", "11"}, {"text-anchor", "end"}},
        bars.limit_name);
  }
  page.close().close();
}

std::string bytes_text(double bytes) {
  return format_bytes(static_cast<int64_t>(bytes));
}

Row memory_row(
    const std::string& name, const MemoryByKind& memory, double reserved) {
  constexpr std::array<const char*, 7> colors = {
      "mp", "mg", "mo", "ma", "mu", "mc", "mw"};
  Row row{name, {}, {}};
  for (size_t i = 0; i < kMemoryKinds.size(); ++i) {
    const double bytes = static_cast<double>(memory[kMemoryKinds[i]]);
    row.parts.push_back(
        {colors[i], std::string(to_string(kMemoryKinds[i])), bytes,
         bytes_text(bytes)});
  }
  row.parts.push_back({"idle", "reserved", reserved, bytes_text(reserved)});
  row.total = bytes_text(sum_of(row));
  return row;
}

Row fullest_row(const std::string& name, const Plan& plan) {
  const auto& memory = plan.step.memory;
  return memory_row(
      name, memory.ranks[static_cast<size_t>(memory.fullest())],
      memory.reserved_bytes);
}

std::string short_name(const Plan& plan) { return to_string(plan.strategy.layout); }

// Each pipeline rank, or some of many.
void add_pipeline_rows(const std::string& name, const Plan& plan, Bars& bars) {
  const auto& memory = plan.step.memory;
  const size_t ranks = memory.ranks.size();
  const size_t shown = std::min(ranks, kMostRanks);
  for (size_t i = 0; i < shown; ++i) {
    const size_t rank = shown < 2 ? 0 : i * (ranks - 1) / (shown - 1);
    bars.rows.push_back(memory_row(
        ranks == 1 ? name + ": " + short_name(plan)
                   : name + ", pipeline rank " + std::to_string(rank),
        memory.ranks[rank], memory.reserved_bytes));
  }
}

}  // namespace

void draw_memory_bars(
    Markup& page, const PlanRequest& request, const PlanResult& result) {
  Bars bars{
      .id = "memory",
      .title = "By kind, against what a job may use",
      .description = "What the devices of each plan hold, by kind.",
      .rows = {},
      .limit = usable_device_bytes(request.cluster),
      .limit_name = {}};
  bars.limit_name = bytes_text(bars.limit) + " for a job";
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
  double most = bars.limit;
  for (const auto& row : bars.rows) most = std::max(most, sum_of(row));
  bars.whole = std::min(most, kMostOverLimit * bars.limit);
  for (auto& row : bars.rows) {
    if (sum_of(row) > bars.whole) row.total += ", cut off here";
  }
  draw(page, bars);
}

void draw_part_bars(
    Markup& page, const PlanRequest&, const PlanResult& result) {
  Bars bars{
      .id = "parts",
      .title = "What the steps of the best layouts are spent on",
      .description = "The time of a step by what it is spent on.",
      .rows = {},
      .limit_name = {}};
  bars.whole = 0;
  for (const auto& plan : result.plans) {
    const StepParts& parts = plan.step.parts;
    double communication = 0;
    for (const double seconds : parts.exposed) communication += seconds;
    Row row{
        short_name(plan), format_seconds(plan.step.step_seconds),
        {{"bw", "matrix products", parts.matrix, {}},
         {"fw", "memory-bound operators", parts.memory, {}},
         {"da", "computed again", parts.recompute, {}},
         {"ex", "communication not hidden", communication, {}},
         {"idle", "bubble", parts.bubble, {}},
         {"op", "optimizer", parts.optimizer, {}},
         {"ot", "other", parts.other, {}}}};
    for (auto& part : row.parts) part.text = format_seconds(part.value);
    bars.whole = std::max(bars.whole, plan.step.step_seconds);
    bars.rows.push_back(row);
  }
  draw(page, bars);
}

}  // namespace echelon
