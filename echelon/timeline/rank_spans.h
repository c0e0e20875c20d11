// Turns the spans that each rank recorded into one timeline.
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

/// Adds to each backward span the stretch in which it only waits for gradients
/// of other ranks, as a nested span of kind `communication` on the same track.
///
/// A trainer sees one call, backward(), which starts collectives as it goes and
/// returns when all are done. The last collective starts when the last gradient
/// is there; from then until the end of the last one nothing computes. Without
/// this, no communication would ever look exposed.
///
/// `spans` are of one rank. A backward span during which no collective began,
/// or in which a wait was recorded already, stays as it is; so does a
/// pipeline's
/// ("0B3"), which records its waits itself.
void add_backward_waits(std::vector<Span>& spans);

/// One timeline from the spans of all ranks: clocks aligned, the earliest begin
/// at 0, spans sorted by begin, waits added to backward spans, receives of a
/// pipeline trimmed (pipeline_blocks.h). Throws DataError when a rank is there
/// twice. A missing rank has no spans and the name "rank N".
Timeline merge_spans(std::vector<RankSpans> ranks, std::string title);

}  // namespace echelon
