#include "echelon/planner/plan_step.h"

#include <algorithm>
#include <utility>

#include "echelon/report/lanes.h"
#include "echelon/report/pipeline_section.h"
#include "echelon/report/report_time.h"
#include "echelon/simulator/simulate.h"
#include "echelon/text/units.h"
#include "echelon/timeline/overlap.h"
#include "echelon/timeline/pipeline_blocks.h"

namespace echelon {
namespace {

// Drawn of one pipeline. With more, the last ones would have nothing in the
// stretch of time that a picture holds, which is the shorter the more rows
// there are.
constexpr int64_t kMostRows = 16;

// Which ranks are drawn, and what the others do.
std::string drawn_text(
    const PlanRequest& request, const Layout& layout, const SimulatedRun& run) {
  const bool pipeline = layout.pp > 1;
  const int64_t others = layout.num_ranks() / layout.pp - 1;
  std::string text = pipeline ? "Drawn is one pipeline, that of rank 0"
                              : "Drawn is one rank, number 0";
  if (layout.pp > kMostRows) {
    text += " (the first " + format_count(kMostRows) + " of its " +
            format_count(layout.pp) + " ranks)";
  }
  if (others == 0) return text + ".";
  const char* noun = pipeline ? " pipeline" : " rank";
  const std::string rest =
      others == 1 ? "the other" + std::string(noun)
                  : "the other " + format_count(others) + noun + "s";
  const char* each = others == 1 ? " does" : " do";
  // One simulated rank for each that is drawn: they do not differ.
  if (run.simulated_ranks <= layout.pp) {
    return text + "; " + rest + each + " the same at the same time.";
  }
  const auto& nodes = request.cluster.groups;
  if (std::any_of(nodes.begin(), nodes.end(), [](const NodeGroup& group) {
        return group.node.device.jitter_seconds > 0;
      })) {
    return text + "; " + rest + each +
           " the same work, in times that differ by the measured jitter.";
  }
  if (request.cluster.mixed()) {
    return text + "; " + rest + each +
           " the same work, on devices of other kinds "
           "in other times.";
  }
  return text + "; " + rest + each +
         " the same, at other times only where their links are others.";
}

std::string idle_text(const StagePictures& stages) {
  const std::string idle = format_percent(stages.idle);
  if (!stages.ideal_idle) return idle + " of the devices' time is idle.";
  return "Filling and emptying the pipeline leaves " +
         format_percent(*stages.ideal_idle) +
         " of the devices' time idle in this schedule, even with equal stages "
         "and "
         "free transfers; simulated with all that is computed and sent, " +
         idle + " of it is.";
}

// Figures stay those of all rows.
void keep_first_rows(PipelinePicture& picture) {
  const auto most = static_cast<size_t>(kMostRows);
  if (picture.rows.size() <= most) return;
  picture.bubble = bubble_fraction(picture.blocks, picture.rows.size());
  picture.makespan = makespan(picture.blocks);
  picture.rows.resize(most);
  std::erase_if(picture.blocks, [](const PipelineBlock& block) {
    return block.row >= kMostRows;
  });
}

void draw_pipeline(
    Markup& page, StagePictures stages, const std::string& drawn) {
  for (auto& picture : stages.pictures) keep_first_rows(picture);
  stages.pictures.back().title = "The step, simulated";
  stages.pictures.back().player_name = "the simulated step";
  page.leaf("p", {{"class", "finding"}}, unbroken(idle_text(stages)));
  page.leaf("p", {{"class", "finding"}}, drawn);
  draw_stage_pictures(page, stages);
}

}  // namespace

void draw_step(Markup& page, const PlanRequest& request, const Plan& plan) {
  const Layout& layout = plan.strategy.layout;
  const SimulatedRun run = simulate(
      request.model, plan.strategy, request.cluster,
      {.timeline_ranks = layout.pp});
  const std::string drawn = drawn_text(request, layout, run);
  if (auto stages = stage_pictures(run.timeline, {}, "step")) {
    draw_pipeline(page, std::move(*stages), drawn);
    return;
  }
  const Diagnosis diagnosis = diagnose(run.timeline);
  draw_lanes_pattern(page);
  page.leaf("p", {{"class", "finding"}}, unbroken(diagnosis.sentence));
  page.leaf("p", {{"class", "finding"}}, drawn);
  draw_typical_step(page, run.timeline, diagnosis, "step-");
}

}  // namespace echelon
