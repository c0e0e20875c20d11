#include "echelon/planner/plan_choices.h"

#include <algorithm>
#include <array>

#include "echelon/planner/plane.h"
#include "echelon/planner/reasons.h"
#include "echelon/text/units.h"

namespace echelon {
namespace {

constexpr std::array kColors = {"bw", "da", "ex", "op", "ot"};
constexpr double kGib = 1 << 30;
constexpr double kMostTicks = 6;
constexpr double kWide = 8;  // the most over the least

std::string devices_text(int64_t number) {
  return format_count(number) + (number == 1 ? " device" : " devices");
}

std::string plan_title(const Plan& plan) {
  return devices_text(plan.devices) + ": " + to_string(plan.strategy) + "\n" +
         format_seconds(plan.step.step_seconds) + " a step, " +
         format_bytes(plan.step.memory.peak_bytes()) +
         " a device, utilisation " +
         format_percent(plan.step.model_flops_utilisation);
}

// Beside a point: short, its title has the order of the axes as well.
std::string degrees_text(const Plan& plan) {
  Layout degrees = plan.strategy.layout;
  degrees.order = Layout{}.order;
  return to_string(degrees);
}

std::vector<int64_t> device_counts(const std::vector<Plan>& plans) {
  std::vector<int64_t> counts;
  for (const auto& plan : plans) counts.push_back(plan.devices);
  std::sort(counts.begin(), counts.end());
  counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
  return counts;
}

// Between the least and the most that a layout takes: powers of 2, or where
// these are too few, so many GiB apart.
std::vector<double> memory_ticks(const std::vector<Plan>& plans, double limit) {
  double least = limit, most = limit;
  for (const auto& plan : plans) {
    least = std::min(least, plan.step.memory.peak_bytes());
    most = std::max(most, plan.step.memory.peak_bytes());
  }
  std::vector<double> ticks;
  double step = kGib / 8;
  while (kMostTicks * step < most - least) step *= 2;
  const bool wide = most > kWide * least;
  for (double bytes = step; bytes <= most;
       bytes = wide ? 2 * bytes : bytes + step) {
    if (bytes >= least) ticks.push_back(bytes);
  }
  return ticks;
}

// Of an axis: narrow, and in one unit from a minute on.
std::string tick_text(double seconds) {
  return seconds < 60 ? format_seconds(seconds) : format_count(seconds) + " s";
}

// The best of the number of devices that was asked for; none when nothing fits.
const Plan* best_of(const PlanPage& input) {
  return input.result.plans.empty() ? nullptr : &input.result.plans.front();
}

Plane choices_plane(const PlanPage& input) {
  const double limit = usable_device_bytes(input.request.cluster);
  return {
      .id = "choices",
      .title = "Time against memory against devices",
      .headline =
          format_count(static_cast<int64_t>(input.choices.size())) + " layouts",
      .description =
          "Each layout's time of a step over the memory of its fullest "
          "device, coloured by the number of devices.",
      .x_name = "memory of the fullest device",
      .y_name = "time of a step",
      .x_text = [](double bytes) { return format_bytes(bytes); },
      .y_text = tick_text,
      .x_ticks = memory_ticks(input.choices, limit),
      .height = 340,
      .points = {},
      .lines = {},
      .x_limit = limit,
      .x_limit_name = "what a job may use",
      .keys = {}};
}

void draw_table(Markup& page, const std::vector<Plan>& plans) {
  page.open("details").leaf("summary", {}, "All of them as a table");
  page.open(
      "div", {{"class", "scroll"},
              {"tabindex", "0"},
              {"role", "region"},
              {"aria-label", "The layouts in figures"}});
  page.open("table").open("thead").open("tr");
  for (const char* head :
       {"Strategy", "Devices", "Step", "Utilisation", "Memory of a device"}) {
    page.leaf("th", {{"scope", "col"}}, head);
  }
  page.close().close().open("tbody");
  for (const auto& plan : plans) {
    page.open("tr").leaf("th", {{"scope", "row"}}, to_string(plan.strategy));
    page.leaf("td", {}, format_count(plan.devices));
    page.leaf("td", {}, format_seconds(plan.step.step_seconds));
    page.leaf("td", {}, format_percent(plan.step.model_flops_utilisation));
    page.leaf("td", {}, format_bytes(plan.step.memory.peak_bytes()));
    page.close();
  }
  page.close().close().close().close();
}

// As if nothing were lost from the fewest devices on.
PlaneLine ideal_line(const std::vector<Plan>& growth) {
  const Plan& first = growth.front();
  const auto fewest = static_cast<double>(first.devices);
  const auto most = static_cast<double>(growth.back().devices);
  return {
      .css = "level",
      .points = {
          {fewest, first.step.step_seconds},
          {most, first.step.step_seconds * fewest / most}}};
}

Plane growth_plane(const PlanPage& input) {
  Plane plane{
      .id = "growth",
      .title = "Time from 8 to 16,384 devices",
      .headline =
          "the best layout of each number; dashed: as if nothing were lost",
      .description =
          "The time of a step over the number of devices, for the best "
          "layout of each number.",
      .x_name = "devices",
      .y_name = "time of a step",
      .x_text = [](double devices) { return format_count(devices); },
      .y_text = tick_text,
      .x_ticks = {},
      .height = 300,
      .points = {},
      .lines = {},
      .x_limit_name = {},
      .keys = {}};
  PlaneLine line{.css = "line c1", .points = {}};
  const Plan* best = best_of(input);
  for (const auto& plan : input.growth) {
    const double devices = static_cast<double>(plan.devices);
    const bool here = best && plan.devices == best->devices;
    plane.x_ticks.push_back(devices);
    plane.points.push_back(
        {devices, plan.step.step_seconds, here ? "ex" : "bw", plan_title(plan),
         here ? degrees_text(plan) : "", here});
    line.points.emplace_back(devices, plan.step.step_seconds);
  }
  plane.lines = {ideal_line(input.growth), line};
  return plane;
}

}  // namespace

void draw_choices(Markup& page, const PlanPage& input) {
  if (input.choices.empty()) return;
  Plane plane = choices_plane(input);
  const Plan* best = best_of(input);
  const auto counts = device_counts(input.choices);
  const auto color = [&](int64_t devices) {
    const auto at = std::find(counts.begin(), counts.end(), devices);
    return std::string(
        kColors[static_cast<size_t>(at - counts.begin()) % kColors.size()]);
  };
  for (const auto& plan : input.choices) {
    const bool is_best =
        best && to_string(plan.strategy) == to_string(best->strategy);
    plane.points.push_back(
        {plan.step.memory.peak_bytes(), plan.step.step_seconds,
         color(plan.devices), plan_title(plan),
         is_best ? degrees_text(plan) : "", is_best});
  }
  for (const int64_t devices : counts) {
    plane.keys.emplace_back(color(devices), devices_text(devices));
  }
  page.leaf("h2", {}, "What else there is");
  draw_plane(page, plane);
  draw_table(page, input.choices);
}

void draw_growth(Markup& page, const PlanPage& input) {
  if (input.growth.empty()) return;
  page.leaf("h2", {}, "More and fewer devices");
  draw_plane(page, growth_plane(input));
  const int64_t fewest = input.growth.front().devices;
  if (fewest > 8) {
    page.leaf(
        "p", {{"class", "note"}},
        "Fewer than " + devices_text(fewest) +
            " hold no plan for this model and batch.");
  }
}

}  // namespace echelon
