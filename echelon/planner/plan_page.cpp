#include "echelon/planner/plan_page.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "echelon/planner/configuration.h"
#include "echelon/planner/plan_bars.h"
#include "echelon/planner/plan_step.h"
#include "echelon/planner/plane.h"
#include "echelon/planner/reasons.h"
#include "echelon/timeline/page.h"
#include "echelon/timeline/units.h"

namespace echelon {
namespace {

constexpr int64_t kMostDevices = 16384;
constexpr int64_t kChoicesHere = 12;
constexpr int64_t kChoicesElsewhere = 6;
constexpr std::array kColors = {"bw", "da", "ex", "op", "ot"};

std::string count(int64_t number) {
  return format_count(static_cast<double>(number));
}

std::string bytes_text(double bytes) {
  return format_bytes(static_cast<int64_t>(bytes));
}

std::string plan_title(const Plan& plan) {
  return count(plan.devices) + (plan.devices == 1 ? " device: " : " devices: ") +
         to_string(plan.strategy) + "\n" +
         format_seconds(plan.step.step_seconds) + " a step, " +
         bytes_text(plan.step.memory.peak_bytes()) + " a device, utilisation " +
         format_percent(plan.step.model_flops_utilisation);
}

void draw_tile(
    Markup& page, const char* name, const std::string& value,
    const std::string& sub) {
  page.open("div", {{"class", "tile"}}).leaf("dt", {}, name);
  page.open("dd").leaf("div", {{"class", "value"}}, value);
  page.leaf("div", {{"class", "sub"}}, sub).close().close();
}

void draw_tiles(Markup& page, const PlanPage& input) {
  const Plan& best = input.result.plans.front();
  const StepEstimate& step = best.step;
  const double limit = usable_device_bytes(input.request.cluster);
  page.open("dl", {{"class", "tiles"}});
  draw_tile(
      page, "A step", format_seconds(step.step_seconds),
      count(input.request.global_batch) + " samples");
  draw_tile(
      page, input.request.model.transformer ? "Tokens/s" : "Samples/s",
      format_count(step.tokens_per_second),
      format_count(step.tokens_per_second / static_cast<double>(best.devices)) +
          " a device");
  draw_tile(
      page, "Utilisation", format_percent(step.model_flops_utilisation),
      "of the peak in " + std::string(to_string(input.request.precision)));
  draw_tile(
      page, "Memory of a device", bytes_text(step.memory.peak_bytes()),
      "of " + bytes_text(limit));
  draw_tile(
      page, "Bubble", format_percent(step.parts.bubble / step.step_seconds),
      "of the step");
  page.close();
}

void draw_reason(Markup& page, const PlanPage& input) {
  const Reason& reason = input.result.reason;
  page.leaf("h2", {}, "Diagnosis").leaf("p", {{"class", "lead"}}, reason.diagnosis);
  page.leaf("h2", {}, "Fix").leaf("p", {{"class", "lead"}}, reason.fix);
  page.open("details").leaf("summary", {}, "The configuration to paste");
  page.leaf("pre", {}, to_configuration(input.result.plans.front(), input.request));
  page.close();
  page.leaf("h2", {}, "Why it works").leaf("p", {{"class", "lead"}}, reason.why);
  if (input.result.others.empty()) return;
  page.leaf("h2", {}, "Why not").open("dl", {{"class", "facts"}});
  for (const auto& other : input.result.others) {
    page.open("div").leaf("dt", {}, other.name).leaf("dd", {}, other.because);
    page.close();
  }
  page.close();
}

std::vector<int64_t> device_counts(const std::vector<Plan>& plans) {
  std::vector<int64_t> counts;
  for (const auto& plan : plans) counts.push_back(plan.devices);
  std::sort(counts.begin(), counts.end());
  counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
  return counts;
}

void draw_choices(Markup& page, const PlanPage& input) {
  const Plan& best = input.result.plans.front();
  const auto counts = device_counts(input.choices);
  Plane plane{
      .id = "choices",
      .title = "Time against memory against devices",
      .headline = count(static_cast<int64_t>(input.choices.size())) + " layouts",
      .description = "Each layout's time of a step over the memory of its fullest "
                     "device, coloured by the number of devices.",
      .x_name = "memory of the fullest device",
      .y_name = "time of a step",
      .x_text = [](double bytes) { return bytes_text(bytes); },
      .y_text = [](double seconds) { return format_seconds(seconds); },
      .x_ticks = {},
      .height = 340,
      .points = {},
      .lines = {},
      .x_limit = usable_device_bytes(input.request.cluster),
      .x_limit_name = "what a job may use",
      .keys = {}};
  for (double gib = 1; gib <= 2048; gib *= 2) {
    double least = plane.x_limit, most = plane.x_limit;
    for (const auto& plan : input.choices) {
      least = std::min(least, plan.step.memory.peak_bytes());
      most = std::max(most, plan.step.memory.peak_bytes());
    }
    const double bytes = gib * (1 << 30);
    if (bytes >= least && bytes <= most) plane.x_ticks.push_back(bytes);
  }
  const auto color = [&](int64_t devices) {
    const auto at = std::find(counts.begin(), counts.end(), devices);
    return std::string(
        kColors[static_cast<size_t>(at - counts.begin()) % kColors.size()]);
  };
  for (const auto& plan : input.choices) {
    const bool is_best = to_string(plan.strategy) == to_string(best.strategy);
    plane.points.push_back(
        {plan.step.memory.peak_bytes(), plan.step.step_seconds,
         color(plan.devices), plan_title(plan),
         is_best ? to_string(plan.strategy.layout) : "", is_best});
  }
  for (const int64_t devices : counts) {
    plane.keys.emplace_back(color(devices), count(devices) + " devices");
  }
  draw_plane(page, plane);
}

void draw_choices_table(Markup& page, const PlanPage& input) {
  page.open("details").leaf("summary", {}, "All of them as a table");
  page.open("div", {{"class", "scroll"}, {"tabindex", "0"}, {"role", "region"},
                    {"aria-label", "The layouts in figures"}});
  page.open("table").open("thead").open("tr");
  for (const char* head :
       {"Strategy", "Devices", "Step", "Utilisation", "Memory of a device"}) {
    page.leaf("th", {{"scope", "col"}}, head);
  }
  page.close().close().open("tbody");
  for (const auto& plan : input.choices) {
    page.open("tr").leaf("th", {{"scope", "row"}}, to_string(plan.strategy));
    page.leaf("td", {}, count(plan.devices));
    page.leaf("td", {}, format_seconds(plan.step.step_seconds));
    page.leaf("td", {}, format_percent(plan.step.model_flops_utilisation));
    page.leaf("td", {}, bytes_text(plan.step.memory.peak_bytes()));
    page.close();
  }
  page.close().close().close().close();
}

void draw_growth(Markup& page, const PlanPage& input) {
  if (input.growth.empty()) return;
  Plane plane{
      .id = "growth",
      .title = "Time from 8 to 16,384 devices",
      .headline = "the best layout of each number; dashed: as if nothing were lost",
      .description = "The time of a step over the number of devices, for the best "
                     "layout of each number.",
      .x_name = "devices",
      .y_name = "time of a step",
      .x_text = [](double devices) { return format_count(devices); },
      .y_text = [](double seconds) { return format_seconds(seconds); },
      .x_ticks = {},
      .height = 300,
      .points = {},
      .lines = {},
      .x_limit_name = {},
      .keys = {}};
  PlaneLine line{.css = "line c1", .points = {}};
  const Plan& first = input.growth.front();
  for (const auto& plan : input.growth) {
    const double devices = static_cast<double>(plan.devices);
    const bool here = plan.devices == input.result.plans.front().devices;
    plane.x_ticks.push_back(devices);
    plane.points.push_back(
        {devices, plan.step.step_seconds, here ? "ex" : "bw", plan_title(plan),
         here ? to_string(plan.strategy.layout) : "", here});
    line.points.emplace_back(devices, plan.step.step_seconds);
  }
  const double ratio = static_cast<double>(first.devices) /
                       static_cast<double>(input.growth.back().devices);
  PlaneLine ideal{.css = "level", .points = {}};
  ideal.points = {
      {static_cast<double>(first.devices), first.step.step_seconds},
      {static_cast<double>(input.growth.back().devices),
       first.step.step_seconds * ratio}};
  plane.lines = {ideal, line};
  draw_plane(page, plane);
  if (first.devices > 8) {
    page.leaf(
        "p", {{"class", "note"}},
        "Fewer than " + count(first.devices) +
            " devices hold no plan for this model and batch.");
  }
}

}  // namespace

PlanPage make_plan_page(const PlanRequest& request, const PlanResult& result) {
  PlanPage page{.request = request, .result = result, .choices = {}, .growth = {}};
  const int64_t here = result.plans.front().devices;
  page.request.coarse = true;
  std::erase_if(page.request.fixed, [](const auto& fixed) {
    return fixed.first == "devices";
  });
  for (const int64_t devices : {here / 4, here / 2, here, here * 2}) {
    if (devices < 1) continue;
    const auto plans = plans_on(
        page.request, devices, devices == here ? kChoicesHere : kChoicesElsewhere);
    page.choices.insert(page.choices.end(), plans.begin(), plans.end());
  }
  for (int64_t devices = 8; devices <= kMostDevices; devices *= 2) {
    const auto plans = plans_on(page.request, devices, 1);
    page.growth.insert(page.growth.end(), plans.begin(), plans.end());
  }
  page.choices.insert(
      page.choices.end(), result.plans.begin(), result.plans.end());
  return page;
}

std::string to_html(const PlanPage& input) {
  const PlanRequest& request = input.request;
  const Plan& best = input.result.plans.front();
  const bool plays = best.strategy.layout.pp > 1;
  const PageScript script = plays ? PageScript::player : PageScript::none;
  const std::string title = request.model.name + " on " + request.cluster.name;
  Markup page;
  open_page(page, title, script);
  page.open("header");
  page.leaf("p", {{"class", "eyebrow"}}, "Echelon \u00b7 plan");
  page.leaf("h1", {}, title);
  page.leaf(
      "p", {{"class", "lead under"}}, to_string(best.strategy));
  page.close();
  draw_tiles(page, input);
  draw_reason(page, input);
  page.leaf("h2", {}, "Memory of a device");
  draw_memory_bars(page, request, input.result);
  page.leaf("h2", {}, "The step");
  draw_part_bars(page, request, input.result);
  draw_step(page, request, best);
  page.leaf("h2", {}, "What else there is");
  draw_choices(page, input);
  draw_choices_table(page, input);
  page.leaf("h2", {}, "More and fewer devices");
  draw_growth(page, input);
  page.leaf(
      "footer", {},
      "Computed by Echelon from formulas; nothing of it was measured. " +
          input.result.bound);
  return finish_page(std::move(page), script);
}

}  // namespace echelon
