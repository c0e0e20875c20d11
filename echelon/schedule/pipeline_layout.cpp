#include "echelon/schedule/pipeline_layout.h"

#include "echelon/config/section.h"
#include "echelon/error.h"
#include "echelon/schedule/check.h"
#include "echelon/schedule/options.h"

namespace echelon {

void bind(config::Section& section, PipelineLayout& options) {
  section
      .field(
          "microbatches",
          options.microbatches,
          "pieces of a batch that pass the pipeline one after the other; 0: 4 "
          "for each pipeline rank")
      .at_least(0)
      .at_most(1 << 20);
  section
      .field(
          "schedule",
          options.schedule,
          "order in which a pipeline's ranks compute (see echelon schedule)")
      .one_of(schedule_kinds());
  section
      .field(
          "stages_per_rank",
          options.stages_per_rank,
          "pipeline stages that each rank holds; 0: what the schedule takes")
      .at_least(0)
      .at_most(1 << 10);
}

Schedule make_schedule(const PipelineLayout& options, int64_t ranks) {
  const int64_t microbatches =
      options.microbatches > 0 ? options.microbatches : 4 * ranks;
  return make_schedule(ScheduleOptions{
      .kind = options.schedule,
      .ranks = static_cast<int32_t>(ranks),
      .microbatches = static_cast<int32_t>(microbatches),
      .stages_per_rank = static_cast<int32_t>(options.stages_per_rank)});
}

}  // namespace echelon
