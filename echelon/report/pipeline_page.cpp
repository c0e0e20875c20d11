#include "echelon/report/pipeline_page.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <utility>

#include "echelon/report/page.h"
#include "echelon/text/units.h"

namespace echelon::report {
namespace {

double mean_busy(const timeline::PipelineRows& rows) {
  if (rows.rows.empty()) return 0;
  const auto busy = timeline::busy_times(rows.blocks, rows.rows.size());
  return std::accumulate(busy.begin(), busy.end(), 0.0) /
         static_cast<double>(busy.size());
}

// One replica is enough: all have the same schedule.
timeline::PipelineRows first_group(const timeline::PipelineRows& rows) {
  timeline::PipelineRows result;
  for (const auto& row : rows.rows) {
    if (row.group == rows.rows.front().group) result.rows.push_back(row);
  }
  const auto count = static_cast<int32_t>(result.rows.size());
  for (const auto& block : rows.blocks) {
    if (block.row < count) result.blocks.push_back(block);
  }
  return result;
}

bool is_same_work(
    const timeline::PipelineBlock& a, const timeline::PipelineBlock& b) {
  return a.row == b.row && a.kind == b.kind && a.stage == b.stage &&
         a.microbatch == b.microbatch && a.begin == b.begin && a.end == b.end;
}

// One pipeline, or several that do the same at the same time, as in a
// simulation.
struct Pipeline {
  std::vector<timeline::PipelineRow> rows;
  std::vector<timeline::PipelineBlock> blocks;  // rows count from 0
  int64_t alike = 0;                            // how many it stands for
};

std::vector<Pipeline> pipelines_of(const timeline::PipelineRows& all) {
  std::vector<Pipeline> pipelines;
  std::vector<std::pair<size_t, size_t>> places;  // by row: pipeline, row there
  for (const auto& row : all.rows) {
    if (pipelines.empty() || pipelines.back().rows[0].group != row.group) {
      pipelines.emplace_back();
    }
    auto& rows = pipelines.back().rows;
    places.emplace_back(pipelines.size() - 1, rows.size());
    rows.push_back(row);
  }
  for (auto block : all.blocks) {
    const auto [pipeline, row] = places[static_cast<size_t>(block.row)];
    block.row = static_cast<int32_t>(row);
    pipelines[pipeline].blocks.push_back(std::move(block));
  }
  return pipelines;
}

// One of those that are alike. `classes` has the class of each rank of the
// layout: pipelines whose first ranks are of one class are alike, also those
// whose spans the timeline has not.
std::vector<Pipeline> distinct_pipelines(
    const timeline::PipelineRows& all, const std::vector<int32_t>& classes) {
  std::vector<Pipeline> result;
  std::set<int32_t> seen;  // classes of first ranks
  for (Pipeline& one : pipelines_of(all)) {
    const auto rank = static_cast<size_t>(one.rows[0].rank);
    if (rank >= classes.size()) {
      one.alike = 1;
    } else if (seen.insert(classes[rank]).second) {
      one.alike = std::ranges::count(classes, classes[rank]);
    }
    const auto found = std::ranges::find_if(result, [&](const Pipeline& other) {
      return other.rows.size() == one.rows.size() &&
             std::ranges::equal(other.blocks, one.blocks, is_same_work);
    });
    if (found == result.end()) {
      result.push_back(std::move(one));
    } else {
      found->alike += one.alike;
    }
  }
  return result;
}

// A row works as long as in the measured step.
std::optional<timeline::PipelineRows>
ideal_of(const timeline::PipelineRows& measured) {
  timeline::PipelineRows one = first_group(measured);
  auto blocks = timeline::ideal_blocks(one);
  if (!blocks) return {};
  one.blocks = std::move(*blocks);
  const double busy = mean_busy(one);
  const double factor = busy > 0 ? mean_busy(measured) / busy : 1;
  for (auto& block : one.blocks) {
    block.begin *= factor;
    block.end *= factor;
  }
  return one;
}

std::string points(double share) {
  const double value = std::round(1000 * share) / 10;
  return format_number(value) + (value == 1 ? " point" : " points");
}

// The bubble when blocks are as long as they were and nothing waits for
// transfers.
std::optional<double> replayed_bubble(const timeline::PipelineRows& measured) {
  const auto blocks =
      timeline::replayed(measured, [](const timeline::PipelineBlock& block) {
        return block.end - block.begin;
      });
  if (!blocks) return {};
  return timeline::bubble_fraction(*blocks, measured.rows.size());
}

std::string difference_text(
    const timeline::PipelineRows& measured, double ideal, double real) {
  const double total = real - ideal;
  if (total < 0.0005) return "";
  const auto own = replayed_bubble(measured);
  if (!own) return "";
  const double unequal = std::clamp(*own - ideal, 0.0, total);
  const double waits = total - unequal;
  if (waits < 0.0005) {
    return format(
        " The {} between come from blocks of unequal length: the slowest stage "
        "sets the pace.",
        points(total));
  }
  if (unequal < 0.0005) {
    return format(
        " The {} between are transfers and pauses between blocks.",
        points(total));
  }
  return format(
      " Of the {} between, {} {} from blocks of unequal length (the slowest "
      "stage sets the pace), the other {} from transfers and pauses between "
      "blocks.",
      points(total), points(unequal),
      std::round(1000 * unequal) == 10 ? "comes" : "come", points(waits));
}

std::string pipeline_sentence(
    const timeline::PipelineRows& measured, std::optional<double> ideal,
    double real, bool simulated) {
  if (!ideal) {
    return format(
        "Waiting for other stages left the devices idle for {} of the step.",
        format_percent(real));
  }
  return format(
             "Filling and emptying the pipeline leaves {} of the devices' time "
             "idle in this schedule, even with equal stages and free "
             "transfers; the {} step {} {}.",
             format_percent(*ideal), simulated ? "simulated" : "real",
             simulated ? "leaves" : "left", format_percent(real)) +
         difference_text(measured, *ideal, real);
}

std::vector<std::string>
group_names(const timeline::PipelineRows& rows, const std::string& word) {
  int32_t last = 0;
  for (const auto& row : rows.rows) last = std::max(last, row.group);
  std::vector<std::string> names;
  for (int32_t group = 0; last > 0 && group <= last; ++group) {
    names.push_back(format("{} {}", word, group));
  }
  return names;
}

PipelinePicture step_picture(
    timeline::PipelineRows rows, int64_t step, const std::string& id,
    bool simulated, const std::string& group) {
  auto groups = group_names(rows, group);
  return {
      .id = id,
      .title = format(
          "{}: step {}", simulated ? "Simulated" : "Measured",
          format_count(step)),
      .rows = std::move(rows.rows),
      .groups = std::move(groups),
      .blocks = std::move(rows.blocks),
      .player_name = simulated ? "the simulated step" : "the real step"};
}

// The pipelines of a simulation. Those that are alike are drawn once, and a
// sentence says how many of all the picture has.
void add_simulated_step(
    StagePictures& result, const timeline::PipelineRows& measured, int64_t step,
    const timeline::Timeline& timeline, const std::string& id) {
  const auto pipelines = distinct_pipelines(measured, timeline.rank_classes);
  timeline::PipelineRows rows;
  std::vector<std::string> groups;
  int64_t shown = 0;
  for (const Pipeline& one : pipelines) {
    const auto first = static_cast<int32_t>(rows.rows.size());
    std::string name = "pipeline of " + one.rows[0].name;
    if (one.alike > 1) {
      name += " and " + counted(one.alike - 1, "equal one");
    }
    for (auto row : one.rows) {
      row.group = static_cast<int32_t>(groups.size());
      rows.rows.push_back(std::move(row));
    }
    for (auto block : one.blocks) {
      block.row += first;
      rows.blocks.push_back(std::move(block));
    }
    groups.push_back(std::move(name));
    shown += one.alike;
  }
  const auto stages = static_cast<int64_t>(pipelines[0].rows.size());
  const auto ranks = static_cast<int64_t>(
      std::max(timeline.rank_classes.size(), measured.rows.size()));
  auto picture = step_picture(std::move(rows), step, id, true, "pipeline");
  if (pipelines.size() > 1) {
    picture.groups = std::move(groups);
  } else if (shown > 1) {
    picture.title += format(", one of {} equal pipelines", format_count(shown));
  }
  if (shown < ranks / stages) {
    result.sentence += format(
        " The picture has {} of {} pipelines.", format_count(shown),
        format_count(ranks / stages));
  }
  result.pictures.push_back(std::move(picture));
}

std::string
placement_sentence(const timeline::PipelineRows& rows, double idle) {
  const auto count = rows.rows.size();
  if (count < 2) return "One device works alone.";
  auto as_one_row = rows.blocks;
  for (auto& block : as_one_row) block.row = 0;
  const double any = timeline::busy_times(as_one_row, 1).front();
  const double all = mean_busy(rows) * static_cast<double>(rows.rows.size());
  if (any > 0 && all / any < 1.05) {
    return format(
        "One device works at a time while the others wait for it: the forward "
        "goes down the devices, the backward comes back up, and {} of the "
        "devices' time is idle. Model parallelism makes a model fit; with "
        "microbatches, as a pipeline, its devices would work side by side.",
        format_percent(idle));
  }
  return format(
      "{} of the devices' time is idle; at most {} of {} devices work at a "
      "time on average.",
      format_percent(idle), format_number(all / any), count);
}

}  // namespace

std::optional<StagePictures>
pipeline_pictures(const timeline::Timeline& timeline, const std::string& id) {
  const auto step = timeline::typical_pipeline_step(timeline);
  if (!step) return {};
  timeline::PipelineRows measured = timeline::pipeline_rows(timeline, *step);
  StagePictures result;
  result.heading = "The pipeline, step by step";
  result.idle =
      timeline::bubble_fraction(measured.blocks, measured.rows.size());
  if (auto ideal = ideal_of(measured)) {
    PipelinePicture picture{
        .id = id + "-ideal",
        .title = "Ideal schedule",
        .rows = std::move(ideal->rows),
        .blocks = std::move(ideal->blocks),
        .player_name = "the ideal schedule"};
    result.ideal_idle =
        timeline::bubble_fraction(picture.blocks, picture.rows.size());
    result.pictures.push_back(std::move(picture));
  }
  result.sentence = pipeline_sentence(
      measured, result.ideal_idle, result.idle, timeline.simulated);
  if (timeline.simulated) {
    add_simulated_step(result, measured, *step, timeline, id + "-step");
  } else {
    result.pictures.push_back(step_picture(
        std::move(measured), *step, id + "-step", false, "pipeline"));
  }
  return result;
}

std::optional<StagePictures>
placement_pictures(const timeline::Timeline& timeline, const std::string& id) {
  const auto step = timeline::typical_placement_step(timeline);
  if (!step) return {};
  timeline::PipelineRows rows = timeline::placement_rows(timeline, *step);
  StagePictures result;
  result.heading = "The devices, step by step";
  result.idle = timeline::bubble_fraction(rows.blocks, rows.rows.size());
  result.sentence = placement_sentence(rows, result.idle);
  result.pictures.push_back(step_picture(
      std::move(rows), *step, id + "-devices", timeline.simulated, "rank"));
  result.pictures.back().measure_name = "idle";
  return result;
}

std::optional<StagePictures>
stage_pictures(const timeline::Timeline& timeline, const std::string& id) {
  auto result = pipeline_pictures(timeline, id);
  return result ? std::move(result) : placement_pictures(timeline, id);
}

void draw_stage_pictures(Markup& page, const StagePictures& pictures) {
  draw_pipelines(page, pictures.pictures, pictures.pictures.size() - 1);
}

std::string pipeline_page(const PipelinePage& input) {
  Markup page;
  page.add("<header>");
  draw_title(page, "pipeline schedule", input.title);
  page.add("</header><section><h2>Step by step</h2>");
  if (!input.lead.empty()) page.add("<p class='lead'>{}</p>", input.lead);
  // Nothing else needs the page's room.
  const size_t max_blocks = 3000 / std::max<size_t>(1, input.pictures.size());
  draw_pipelines(page, input.pictures, 0, max_blocks);
  page.add("</section>");
  if (!input.facts.empty()) {
    page.add("<section><h2>In figures</h2>");
    draw_facts(page, input.facts);
    page.add("</section>");
  }
  page.add("<footer>Written by Echelon.</footer>");
  return page_of(input.title, std::move(page), PageScript::player);
}

std::string pipeline_page(const PipelinePicture& picture) {
  return pipeline_page(
      PipelinePage{.title = picture.title, .pictures = {picture}});
}

}  // namespace echelon::report
