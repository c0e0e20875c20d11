// make_plan_page() runs the searches that only the page needs, and to_html()
// draws: the headline figures, the reason, the memory of each plan, the best
// plan's step as the simulator runs it, then other layouts and numbers of
// devices (plan_choices.cpp). When nothing fits, the closest plan takes the
// place of the best one, and its step is not drawn.
#include "echelon/planner/plan_page.h"

#include <algorithm>
#include <array>
#include <utility>

#include "echelon/planner/configuration.h"
#include "echelon/planner/plan_choices.h"
#include "echelon/planner/rank_picture.h"
#include "echelon/planner/reasons.h"
#include "echelon/report/chart.h"
#include "echelon/report/page.h"
#include "echelon/report/pipeline_page.h"
#include "echelon/report/sections.h"
#include "echelon/simulator/simulate.h"
#include "echelon/text/units.h"
#include "echelon/timeline/overlap.h"
#include "echelon/timeline/pipeline_blocks.h"

namespace echelon::planner {
namespace {

// --- Bars: what memory is for, what time goes to ----------------------------

constexpr double kMostOverLimit = 1.6;  // longer bars are clipped
constexpr size_t kMostRanks = 8;        // of a pipeline that are shown

// What one pipeline rank holds.
report::StackedRow memory_row(
    const std::string& name, const cost::MemoryEstimate& estimate,
    size_t rank) {
  const timeline::MemoryByKind& memory = estimate.ranks[rank];
  const double reserved = estimate.reserved_bytes;
  constexpr std::array<const char*, 7> colors = {"mp", "mg", "mo", "ma",
                                                 "mu", "mc", "mw"};
  report::StackedRow row{name, {}, {}, estimate.limit(rank)};
  for (size_t i = 0; i < timeline::kMemoryKinds.size(); ++i) {
    const double bytes = static_cast<double>(memory[timeline::kMemoryKinds[i]]);
    row.parts.push_back(
        {colors[i], std::string(timeline::to_string(timeline::kMemoryKinds[i])),
         bytes, format_bytes(bytes)});
  }
  row.parts.push_back({"idle", "reserved", reserved, format_bytes(reserved)});
  row.total = format_bytes(row.sum());
  return row;
}

report::StackedRow fullest_row(const std::string& name, const Plan& plan) {
  const auto& memory = plan.step.memory;
  return memory_row(name, memory, static_cast<size_t>(memory.fullest()));
}

std::string layout_text(const Plan& plan) {
  return to_string(plan.strategy.layout);
}

// A row for each pipeline rank, or for some of many.
void add_pipeline_rows(
    const std::string& name, const Plan& plan, report::StackedBars& bars) {
  const auto& memory = plan.step.memory;
  const size_t ranks = memory.ranks.size();
  const size_t shown = std::min(ranks, kMostRanks);
  for (size_t i = 0; i < shown; ++i) {
    const size_t rank = shown < 2 ? 0 : i * (ranks - 1) / (shown - 1);
    bars.rows.push_back(memory_row(
        ranks == 1 ? name + ": " + layout_text(plan)
                   : format("{}, pipeline rank {}", name, rank),
        memory, rank));
  }
}

// The best plan's pipeline ranks (when nothing fits: the closest one's), then
// the fullest device of the other plans, of the textbook choices and of the
// smallest cluster that would do, each against what a job may use.
void draw_memory_bars(
    report::Markup& page, const PlanRequest& request,
    const PlanResult& result) {
  report::StackedBars bars{
      .id = "memory",
      .title = "By kind, against what a job may use",
      .description = "What the devices of each plan hold, by kind.",
      .limit = usable_device_bytes(request.cluster)};
  bars.limit_name = format_bytes(bars.limit) + " for a job";
  const bool fits = !result.plans.empty();
  add_pipeline_rows(
      fits ? "the best" : "the closest",
      fits ? result.plans.front() : *result.closest, bars);
  for (size_t i = 1; i < result.plans.size(); ++i) {
    bars.rows.push_back(fullest_row(
        format("no. {}: {}", i + 1, layout_text(result.plans[i])),
        result.plans[i]));
  }
  for (const auto& other : result.others) {
    if (!other.plan || other.plan->step.memory.ranks.empty()) continue;
    if (other.name.rfind("the runner-up", 0) == 0) continue;
    bars.rows.push_back(fullest_row(other.name, *other.plan));
  }
  if (!fits && result.smallest) {
    bars.rows.push_back(fullest_row(
        counted(result.smallest->devices, "device") + ": " +
            layout_text(*result.smallest),
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
  report::draw_stacked_bars(page, bars);
}

// The best plans' steps, by what they are spent on.
void draw_part_bars(report::Markup& page, const PlanResult& result) {
  report::StackedBars bars{
      .id = "parts",
      .title = "What the steps of the best layouts are spent on",
      .description = "The time of a step by what it is spent on.",
  };
  for (const auto& plan : result.plans) {
    const cost::StepParts& parts = plan.step.parts;
    double communication = 0;
    for (const double seconds : parts.exposed) communication += seconds;
    report::StackedRow row{
        layout_text(plan),
        format_seconds(plan.step.step_seconds),
        {{"bw", "matmul", parts.matrix, {}},
         {"fw", "memory-bound operators", parts.memory, {}},
         {"da", "recomputed", parts.recompute, {}},
         {"ex", "communication not hidden", communication, {}},
         {"idle", "bubble", parts.bubble, {}},
         {"op", "optimizer", parts.optimizer, {}},
         {"ot", "other", parts.other, {}}},
        0};
    for (auto& part : row.parts) part.text = format_seconds(part.value);
    bars.rows.push_back(row);
  }
  report::draw_stacked_bars(page, bars);
}

// --- The step ---------------------------------------------------------------

// Rows that are drawn of one pipeline. The more rows a picture has, the shorter
// is the time that it holds: with more of them the last ones would be empty.
constexpr int64_t kMostRows = 16;

// Says which ranks are drawn, and what the others do.
std::string drawn_text(
    const PlanRequest& request, const Layout& layout,
    const simulator::SimulatedRun& run) {
  const bool pipeline = layout.pp > 1;
  const int64_t others = layout.num_ranks() / layout.pp - 1;
  std::string text = pipeline ? "Drawn is one pipeline, that of rank 0"
                              : "Drawn is one rank, number 0";
  if (layout.pp > kMostRows) {
    text += format(
        " (the first {} of its {} ranks)", format_count(kMostRows),
        format_count(layout.pp));
  }
  if (others == 0) return text + ".";
  const char* noun = pipeline ? " pipeline" : " rank";
  const std::string rest =
      others == 1 ? "the other" + std::string(noun)
                  : "the other " + format_count(others) + noun + "s";
  const char* each = others == 1 ? " does" : " do";
  // Only the drawn ranks were simulated: the others do not differ from them.
  if (run.simulated_ranks <= layout.pp) {
    return text + "; " + rest + each + " the same at the same time.";
  }
  if (request.cluster.mixed()) {
    return text + "; " + rest + each +
           " the same work, on devices of other kinds in other times.";
  }
  return text + "; " + rest + each +
         " the same, at other times only where their links are others.";
}

std::string idle_text(const report::StagePictures& stages) {
  const std::string idle = format_percent(stages.idle);
  if (!stages.ideal_idle) return idle + " of the devices' time is idle.";
  return format(
      "Filling and emptying the pipeline leaves {} of the devices' time idle "
      "in this schedule, even with equal stages and free transfers; simulated "
      "with all that is computed and sent, {} of it is.",
      format_percent(*stages.ideal_idle), idle);
}

// The figures stay those of all rows.
void keep_first_rows(report::PipelinePicture& picture) {
  const auto most = static_cast<size_t>(kMostRows);
  if (picture.rows.size() <= most) return;
  picture.bubble =
      timeline::bubble_fraction(picture.blocks, picture.rows.size());
  picture.makespan = timeline::makespan(picture.blocks);
  picture.rows.resize(most);
  std::erase_if(picture.blocks, [](const timeline::PipelineBlock& block) {
    return block.row >= kMostRows;
  });
}

void draw_pipeline(
    report::Markup& page, report::StagePictures stages,
    const std::string& drawn) {
  for (auto& picture : stages.pictures) keep_first_rows(picture);
  stages.pictures.back().title = "The step, simulated";
  stages.pictures.back().player_name = "the simulated step";
  page.add(
      "<p class='finding'>{}</p><p class='finding'>{}</p>",
      unbroken(idle_text(stages)), drawn);
  report::draw_stage_pictures(page, stages);
}

// The step of a plan, simulated, as a report draws a real one: rows of
// microbatches for one pipeline, else what one rank computes and sends; and
// what the others do, in words.
void draw_step(
    report::Markup& page, const PlanRequest& request, const Plan& plan) {
  const Layout& layout = plan.strategy.layout;
  const simulator::SimulatedRun run = simulator::simulate(
      request.model, plan.strategy, request.cluster,
      {.timeline_ranks = layout.pp});
  const std::string drawn = drawn_text(request, layout, run);
  if (auto stages = report::stage_pictures(run.timeline, "step")) {
    draw_pipeline(page, std::move(*stages), drawn);
    return;
  }
  const timeline::Diagnosis diagnosis = timeline::diagnose(run.timeline);
  page.add(
      "<p class='finding'>{}</p><p class='finding'>{}</p>",
      unbroken(diagnosis.sentence), drawn);
  report::draw_typical_step(page, run.timeline, diagnosis, "step-");
}

// --- Headline figures and the reason ----------------------------------------

constexpr int64_t kLargestCluster = 16384;
constexpr int64_t kChoicesHere = 12;
constexpr int64_t kChoicesElsewhere = 6;

// The plan that is drawn in detail: the best, or the closest when nothing fits.
const Plan& shown_plan(const PlanResult& result) {
  return result.plans.empty() ? *result.closest : result.plans.front();
}

void draw_figures(report::Markup& page, const PlanPage& input) {
  const Plan& best = input.result.plans.front();
  const cost::StepEstimate& step = best.step;
  const double limit = usable_fullest_bytes(input.request, best);
  report::draw_tiles(
      page,
      {{"A step", format_seconds(step.step_seconds),
        counted(input.request.global_batch, "sample")},
       {input.request.model.transformer ? "Tokens/s" : "Samples/s",
        format_count(step.tokens_per_second),
        format_count(
            step.tokens_per_second / static_cast<double>(best.devices)) +
            " a device"},
       {"MFU", format_percent(step.model_flops_utilisation),
        format(
            "of the peak in {}", cluster::to_string(input.request.precision))},
       {"Memory of a device", format_bytes(step.memory.peak_bytes()),
        "of " + format_bytes(limit)},
       {"Bubble", format_percent(step.parts.bubble / step.step_seconds),
        "of the step"}});
}

void draw_what_is_missing(report::Markup& page, const PlanPage& input) {
  const auto& smallest = input.result.smallest;
  const double needed = input.result.closest->step.memory.peak_bytes();
  const double limit =
      usable_fullest_bytes(input.request, *input.result.closest);
  report::draw_tiles(
      page, {{"The closest needs", format_bytes(needed), "of each device"},
             {"A device has", format_bytes(limit), "for a job"},
             {"Devices", format_count(input.request.cluster.num_devices()),
              "are here"},
             {"Would do", smallest ? format_count(smallest->devices) : "none",
              smallest ? "such devices" : "number of such devices"}});
}

void draw_reason(report::Markup& page, const PlanPage& input) {
  const PlanResult& result = input.result;
  const bool fits = !result.plans.empty();
  const Reason& reason = result.reason;
  page.add("<h2>Need</h2><p class='lead'>{}</p>", reason.diagnosis);
  if (!fits) {
    page.add(
        "<h2>The closest plan</h2><p class='lead'>{}</p><h2>What would do"
        "</h2><p class='lead'>{}</p>",
        reason.fix, reason.why);
    return;
  }
  page.add(
      "<h2>Plan</h2><p class='lead'>{}</p><details><summary>The configuration "
      "to paste</summary><pre class='copy'>{}</pre></details>",
      reason.why, to_configuration(result.plans.front(), input.request));
  draw_rank_groups(page, input.request.cluster, result.plans.front());
  if (result.others.empty()) return;
  report::Facts others;
  for (const auto& other : result.others) {
    others.emplace_back(other.name, other.because);
  }
  page.add("<h2>Why not</h2>");
  report::draw_facts(page, others);
}

void draw_steps(report::Markup& page, const PlanPage& input) {
  page.add("<h2>The step</h2>");
  draw_part_bars(page, input.result);
  draw_step(page, input.request, input.result.plans.front());
}

bool is_known(const std::vector<Plan>& plans, const Plan& plan) {
  return std::ranges::any_of(plans, [&](const Plan& one) {
    return cost::to_string(one.strategy) == cost::to_string(plan.strategy);
  });
}

}  // namespace

PlanPage make_plan_page(const PlanRequest& request, const PlanResult& result) {
  PlanPage page{
      .request = request,
      .result = result,
      .choices = result.plans,
      .growth = {}};
  // The page searches many numbers of devices, and its pictures need no exact
  // optimum.
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
  const std::string title = request.model.name + " on " + request.cluster.name;
  report::Markup page;
  page.add("<header>");
  report::draw_title(page, "plan", title);
  if (fits) {
    page.add("<p class='lead under'>{}</p>", cost::to_string(shown.strategy));
  } else {
    page.add("<p class='outcome'>Nothing fits</p>");
  }
  page.add("</header>");
  if (fits) {
    draw_figures(page, input);
  } else {
    draw_what_is_missing(page, input);
  }
  draw_reason(page, input);
  page.add("<h2>Memory of a device</h2>");
  draw_memory_bars(page, request, input.result);
  if (fits) draw_steps(page, input);
  draw_choices(page, input);
  draw_growth(page, input);
  page.add(
      "<footer>Computed by Echelon; nothing was measured. {}{}</footer>",
      request.free_share > 0 ? format(
                                   "{} of each device's memory stays free. ",
                                   format_percent(request.free_share))
                             : "",
      input.result.bound);
  return report::page_of(
      title, std::move(page),
      plays  ? report::PageScript::player_and_copy
      : fits ? report::PageScript::copy
             : report::PageScript::none);
}

}  // namespace echelon::planner
