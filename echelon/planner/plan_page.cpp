#include "echelon/planner/plan_page.h"

#include <algorithm>

#include "echelon/planner/configuration.h"
#include "echelon/planner/plan_bars.h"
#include "echelon/planner/plan_choices.h"
#include "echelon/planner/plan_step.h"
#include "echelon/planner/plane_style.h"
#include "echelon/planner/reasons.h"
#include "echelon/report/page.h"
#include "echelon/text/units.h"

namespace echelon {
namespace {

constexpr int64_t kLargestCluster = 16384;
constexpr int64_t kChoicesHere = 12;
constexpr int64_t kChoicesElsewhere = 6;

void draw_tile(
    Markup& page, const char* name, const std::string& value,
    const std::string& sub) {
  page.open("div", {{"class", "tile"}}).leaf("dt", {}, name);
  page.open("dd").leaf("div", {{"class", "value"}}, value);
  page.leaf("div", {{"class", "sub"}}, sub).close().close();
}

// What is drawn in detail: the best, or what is nearest to it when nothing
// fits.
const Plan& shown_plan(const PlanResult& result) {
  return result.plans.empty() ? *result.closest : result.plans.front();
}

void draw_tiles(Markup& page, const PlanPage& input) {
  const Plan& best = input.result.plans.front();
  const StepEstimate& step = best.step;
  const double limit = usable_fullest_bytes(input.request, best);
  page.open("dl", {{"class", "tiles"}});
  draw_tile(
      page, "A step", format_seconds(step.step_seconds),
      format_count(input.request.global_batch) + " samples");
  draw_tile(
      page, input.request.model.transformer ? "Tokens/s" : "Samples/s",
      format_count(step.tokens_per_second),
      format_count(step.tokens_per_second / static_cast<double>(best.devices)) +
          " a device");
  draw_tile(
      page, "Utilisation", format_percent(step.model_flops_utilisation),
      "of the peak in " + std::string(to_string(input.request.precision)));
  draw_tile(
      page, "Memory of a device", format_bytes(step.memory.peak_bytes()),
      "of " + format_bytes(limit));
  draw_tile(
      page, "Bubble", format_percent(step.parts.bubble / step.step_seconds),
      "of the step");
  page.close();
}

void draw_what_is_missing(Markup& page, const PlanPage& input) {
  const auto& smallest = input.result.smallest;
  const double needed = input.result.closest->step.memory.peak_bytes();
  const double limit =
      usable_fullest_bytes(input.request, *input.result.closest);
  page.open("dl", {{"class", "tiles"}});
  draw_tile(page, "The closest needs", format_bytes(needed), "of each device");
  draw_tile(page, "A device has", format_bytes(limit), "for a job");
  draw_tile(
      page, "Devices", format_count(input.request.cluster.num_devices()),
      "are here");
  draw_tile(
      page, "Would do", smallest ? format_count(smallest->devices) : "none",
      smallest ? "such devices" : "number of such devices");
  page.close();
}

void draw_reason(Markup& page, const PlanPage& input) {
  const PlanResult& result = input.result;
  const bool fits = !result.plans.empty();
  const Reason& reason = result.reason;
  page.leaf("h2", {}, "Diagnosis")
      .leaf("p", {{"class", "lead"}}, reason.diagnosis);
  page.leaf("h2", {}, fits ? "Fix" : "The closest");
  page.leaf("p", {{"class", "lead"}}, reason.fix);
  if (fits) {
    page.open("details").leaf("summary", {}, "The configuration to paste");
    page.leaf("pre", {}, to_configuration(result.plans.front(), input.request));
    page.close();
  }
  page.leaf("h2", {}, fits ? "Why it works" : "What would do");
  page.leaf("p", {{"class", "lead"}}, reason.why);
  if (result.others.empty()) return;
  page.leaf("h2", {}, "Why not").open("dl", {{"class", "facts"}});
  for (const auto& other : result.others) {
    page.open("div").leaf("dt", {}, other.name).leaf("dd", {}, other.because);
    page.close();
  }
  page.close();
}

void draw_steps(Markup& page, const PlanPage& input) {
  page.leaf("h2", {}, "The step");
  draw_part_bars(page, input.request, input.result);
  draw_step(page, input.request, input.result.plans.front());
}

bool is_known(const std::vector<Plan>& plans, const Plan& plan) {
  return std::any_of(plans.begin(), plans.end(), [&](const Plan& one) {
    return to_string(one.strategy) == to_string(plan.strategy);
  });
}

}  // namespace

PlanPage make_plan_page(const PlanRequest& request, const PlanResult& result) {
  PlanPage page{
      .request = request,
      .result = result,
      .choices = result.plans,
      .growth = {}};
  page.request.coarse = true;
  std::erase_if(page.request.fixed, [](const auto& fixed) {
    return fixed.first == "devices";
  });
  if (!result.plans.empty() || result.smallest) {
    const Plan& plan =
        result.plans.empty() ? *result.smallest : result.plans.front();
    const int64_t here = plan.devices;
    for (const int64_t devices : {here / 4, here / 2, here, here * 2}) {
      if (devices < 1) continue;
      for (const auto& choice : plans_on(
               page.request, devices,
               devices == here ? kChoicesHere : kChoicesElsewhere)) {
        if (!is_known(page.choices, choice)) page.choices.push_back(choice);
      }
    }
  }
  for (int64_t devices = 8; devices <= kLargestCluster; devices *= 2) {
    const auto plans = plans_on(page.request, devices, 1);
    page.growth.insert(page.growth.end(), plans.begin(), plans.end());
  }
  return page;
}

std::string to_html(const PlanPage& input) {
  const PlanRequest& request = input.request;
  const bool fits = !input.result.plans.empty();
  const Plan& shown = shown_plan(input.result);
  const bool plays = fits && shown.strategy.layout.pp > 1;
  const PageScript script = plays ? PageScript::player : PageScript::none;
  const std::string title = request.model.name + " on " + request.cluster.name;
  Markup page;
  open_page(page, title, script, detail::kPlaneStyle);
  page.open("header");
  page.leaf("p", {{"class", "eyebrow"}}, "Echelon \u00b7 plan");
  page.leaf("h1", {}, title);
  if (fits) {
    page.leaf("p", {{"class", "lead under"}}, to_string(shown.strategy));
  } else {
    page.leaf("p", {{"class", "outcome"}}, "Nothing fits");
  }
  page.close();
  if (fits) {
    draw_tiles(page, input);
  } else {
    draw_what_is_missing(page, input);
  }
  draw_reason(page, input);
  page.leaf("h2", {}, "Memory of a device");
  draw_memory_bars(page, request, input.result);
  if (fits) draw_steps(page, input);
  draw_choices(page, input);
  draw_growth(page, input);
  page.leaf(
      "footer", {},
      "Computed by Echelon from formulas; nothing of it was measured. " +
          input.result.bound);
  return finish_page(std::move(page), script);
}

}  // namespace echelon
