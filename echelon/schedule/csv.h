// Schedules as text: the compute-only CSV of torch.distributed.pipelining.
//
//   0F0,0F1,,0B0,,0B1          rank 0
//   ,1F0,1B0,1F1,1B1           rank 1
//
// A row for each rank, a cell for each action: stage, F, B, I or W, microbatch.
// An empty cell is an idle tick. A rank holds the stages that its row names.
#pragma once

#include <iosfwd>
#include <string>
#include <string_view>

#include "echelon/schedule/schedule.h"

namespace echelon {

/// Writes `schedule`, which check() accepts, with each action at its tick, if
/// every action takes one tick. Throws ConfigError when it deadlocks.
void write_schedule_csv(const Schedule& schedule, std::ostream& out);

/// Reads what write_schedule_csv or torch.distributed.pipelining wrote. The
/// highest numbers in it say how many stages and microbatches there are. Idle
/// ticks are dropped. The overlapped form "(0F1;3B0)OVERLAP_F_B" stands for its
/// two actions, in order. Throws ConfigError with line, column and cell for
/// anything else. check() says whether the schedule can be run.
Schedule parse_schedule_csv(std::string_view text, const std::string& name);

/// The same for a file; ConfigError also when it cannot be read.
Schedule read_schedule_csv(const std::string& path);

}  // namespace echelon
