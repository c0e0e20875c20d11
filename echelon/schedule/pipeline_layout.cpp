#include "echelon/schedule/pipeline_layout.h"

#include <algorithm>

#include "echelon/config/section.h"
#include "echelon/error.h"
#include "echelon/schedule/check.h"
#include "echelon/schedule/csv.h"
#include "echelon/schedule/options.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

[[noreturn]] void refuse(
    const PipelineLayout& options, const std::string& has,
    const std::string& but) {
  throw ConfigError(format(
      "[layout] schedule_file = \"{}\" has {}, but {}", options.schedule_file,
      has, but));
}

void check_file(
    const PipelineLayout& options, const Schedule& schedule, int64_t ranks) {
  if (schedule.num_ranks() != ranks) {
    refuse(
        options, format("{} rows, one for each rank", schedule.num_ranks()),
        format("pp = {}; set pp to {}", ranks, schedule.num_ranks()));
  }
  if (options.microbatches > 0 &&
      options.microbatches != schedule.num_microbatches) {
    refuse(
        options, format("{} microbatches", schedule.num_microbatches),
        format(
            "microbatches = {}; leave that out or change one",
            options.microbatches));
  }
  for (int32_t rank = 0; rank < schedule.num_ranks(); ++rank) {
    const auto held = schedule.stages_of(rank).size();
    if (options.stages_per_rank > 0 &&
        held != static_cast<size_t>(options.stages_per_rank)) {
      refuse(
          options,
          format(
              "{} {} on rank {}", held, held == 1 ? "stage" : "stages", rank),
          format(
              "stages_per_rank = {}; leave that out or change one",
              options.stages_per_rank));
    }
  }
}

int32_t narrow(int64_t value) {
  return static_cast<int32_t>(std::clamp<int64_t>(value, -1, INT32_MAX));
}

}  // namespace

void bind(config::Section& section, PipelineLayout& options) {
  section.field(
      "microbatches", options.microbatches,
      "parts of a batch that pass through the pipeline one after the other; 0: "
      "as many as divide it, up to 4 for each pipeline rank",
      {.at_least = 0, .at_most = 1 << 20});
  section
      .field(
          "schedule", options.schedule,
          "order in which a pipeline's ranks compute (see echelon schedule)")
      .one_of(schedule_kinds());
  section.field(
      "stages_per_rank", options.stages_per_rank,
      "pipeline stages that each rank holds; 0: what the schedule takes",
      {.at_least = 0, .at_most = 1 << 10});
  section.field(
      "schedule_file", options.schedule_file,
      "your own schedule, in place of the three above: CSV as `echelon "
      "schedule --format csv` writes it");
}

Schedule make_schedule(const PipelineLayout& options, int64_t ranks) {
  if (!options.schedule_file.empty()) {
    Schedule schedule = read_schedule_csv(options.schedule_file);
    check(schedule);
    check_file(options, schedule, ranks);
    return schedule;
  }
  const int64_t microbatches =
      options.microbatches > 0 ? options.microbatches : 4 * ranks;
  Schedule schedule = make_schedule(ScheduleOptions{
      .kind = options.schedule,
      .ranks = narrow(ranks),
      .microbatches = narrow(microbatches),
      .stages_per_rank = narrow(options.stages_per_rank)});
  check(schedule);
  return schedule;
}

}  // namespace echelon
