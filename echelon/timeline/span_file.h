// How the ranks' spans come together: each rank writes a file, rank 0 merges.
//
// The file is JSON lines: first {"echelon_spans":1,"rank":3,"rank_name":"rank 3
// (cpu)","clock_offset_ns":0}, then one array a span:
// [begin_ns,end_ns,"kind","track","name",step,bytes].
#pragma once

#include <cstdint>
#include <filesystem>
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
};

/// Replaces the file. Throws Error when it cannot be written.
void write_span_file(const std::filesystem::path& path, const RankSpans& spans);

/// Throws DataError with file and line for what it cannot read; a last line
/// without its end (the rank was killed) is left out.
RankSpans read_span_file(const std::filesystem::path& path);

/// One timeline from the spans of all ranks: clocks aligned, the first begin of
/// any of them at 0, spans sorted by begin, waits
/// in backward spans added (waits.h), receives of a pipeline trimmed
/// (pipeline_blocks.h). Throws DataError when a rank is
/// there twice. A rank that is missing has no spans and the name "rank N".
Timeline merge_spans(std::vector<RankSpans> ranks, std::string title);

}  // namespace echelon
