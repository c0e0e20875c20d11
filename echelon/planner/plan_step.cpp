#include "echelon/planner/plan_step.h"

#include "echelon/simulator/simulate.h"
#include "echelon/timeline/lanes.h"
#include "echelon/timeline/overlap.h"
#include "echelon/timeline/pipeline_section.h"
#include "echelon/timeline/report_time.h"
#include "echelon/timeline/units.h"

namespace echelon {
namespace {

constexpr int64_t kPipelineRows = 16;
constexpr int64_t kLanes = 4;

}  // namespace

void draw_step(Markup& page, const PlanRequest& request, const Plan& plan) {
  const bool pipeline = plan.strategy.layout.pp > 1;
  const SimulatedRun run = simulate(
      request.model, plan.strategy, request.cluster,
      {.timeline_ranks = pipeline ? kPipelineRows : kLanes});
  if (const auto stages = stage_pictures(run.timeline, {}, "step")) {
    page.leaf("p", {{"class", "finding"}}, unbroken(stages->sentence));
    draw_stage_pictures(page, *stages);
    return;
  }
  const Diagnosis diagnosis = diagnose(run.timeline);
  draw_lanes_pattern(page);
  page.leaf("p", {{"class", "finding"}}, unbroken(diagnosis.sentence));
  draw_typical_step(page, run.timeline, diagnosis, "step-");
}

}  // namespace echelon
