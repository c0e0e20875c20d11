// How the spans of all ranks become one timeline.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/timeline/timeline.h"

namespace echelon {

/// What one rank recorded, in the steady clock of its host.
struct RankSpans {
  int32_t rank = 0;
  std::string rank_name;        // "rank 3 (cpu)"
  int64_t clock_offset_ns = 0;  // rank 0's clock minus ours; 0 on one host
  std::vector<Span> spans;
  RankMemory memory;  // without samples: not measured
};

/// One timeline from the spans of all ranks: clocks aligned, the first begin of
/// any of them at 0, spans sorted by begin, waits in backward spans added
/// (waits.h), receives of a pipeline trimmed (pipeline_blocks.h). Throws
/// DataError when a rank is there twice. A rank that is missing has no spans
/// and the name "rank N".
Timeline merge_spans(std::vector<RankSpans> ranks, std::string title);

}  // namespace echelon
