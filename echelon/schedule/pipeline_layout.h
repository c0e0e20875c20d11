// How a configuration asks for a pipeline's schedule: the keys of [layout] next
// to the degrees.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/schedule/schedule.h"

namespace echelon {

namespace config {
class Section;
}

struct PipelineLayout {
  int64_t microbatches = 0;       // of a step; 0: 4 per pipeline rank, or
                                  // fewer where the batch is known
  std::string schedule = "1f1b";  // one of schedule_kinds()
  int64_t stages_per_rank = 0;    // 0: what the schedule takes
  std::string schedule_file;      // CSV; replaces the three above
};

/// microbatches, schedule, stages_per_rank, schedule_file.
void bind(config::Section& section, PipelineLayout& options);  // [layout]

/// The schedule of `ranks` pipeline ranks, checked. Throws ConfigError as
/// make_schedule, read_schedule_csv and check do; also when a file is for
/// another number of ranks, or contradicts the numbers that are set.
Schedule make_schedule(const PipelineLayout& options, int64_t ranks);

}  // namespace echelon
