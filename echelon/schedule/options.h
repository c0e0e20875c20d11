// The kinds of schedule, and how to ask for one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/schedule/schedule.h"

namespace echelon {

struct ScheduleOptions {
  std::string kind = "1f1b";  // one of schedule_kinds()
  int32_t ranks = 1;          // p, the pipeline ranks: --stages
  int32_t microbatches = 1;   // m
  /// v, the stages that each rank holds: the model is partitioned into p * v
  /// stages. 0 takes the kind's own number: 2 for interleaved, breadth_first,
  /// zb-v and dualpipev, 1 for the others.
  int32_t stages_per_rank = 0;
};

/// gpipe, 1f1b, interleaved, breadth_first, zb-h1, zb-h2, zb-v, dualpipev.
const std::vector<std::string>& schedule_kinds();

/// The number that stages_per_rank = 0 stands for. Throws ConfigError for an
/// unknown kind.
int32_t stages_per_rank_of(const std::string& kind);

/// The most cells, p * v * m, of a schedule that is generated.
inline constexpr int64_t kMaxScheduleCells = int64_t{1} << 25;

/// Generates the schedule, which check() (check.h) accepts. Throws ConfigError
/// for an unknown kind, and for numbers for which the kind is not defined; the
/// message names the nearest valid ones.
Schedule make_schedule(const ScheduleOptions& options);

}  // namespace echelon
