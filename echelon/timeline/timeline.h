// What each rank did and when: one type for measured and simulated runs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/timeline/memory_kind.h"

namespace echelon {

/// What a span of time was spent on; it decides the colour in pictures.
enum class SpanKind {
  forward,
  backward,
  optimizer,
  communication,
  data,  // waiting for the next batch
  evaluation,
  other,
};

/// "forward", "communication", …: the category in traces and pictures.
const char* span_kind_name(SpanKind kind);
/// The inverse; throws DataError for an unknown word.
SpanKind span_kind_from_name(const std::string& name);

/// One stretch of work of one rank. Times are nanoseconds since the timeline's
/// origin, which all ranks share.
///
/// Spans of one track may nest; the innermost one says what the track does. So
/// a wait for a collective inside "backward" is a span of kind `communication`
/// on the track "compute", and that stretch does not count as computing.
/// Communication in the background is on a track of its own ("comm"), one span
/// per collective from its launch to its end; such spans may overlap.
struct Span {
  int32_t rank = 0;
  std::string track;  // lane within the rank: "compute", "comm", "loader"
  std::string name;   // "forward", "all_reduce bucket 0"
  SpanKind kind = SpanKind::other;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  int64_t step = -1;  // training step, -1 when outside of one
  int64_t bytes = 0;  // moved by a collective, else 0
  std::string axis;   // of a collective's group: "tp"; empty: not known
};

/// The memory of one rank while spans were recorded, by kind: each sample is
/// valid until the next one. Times as in spans, ascending.
struct RankMemory {
  int32_t rank = 0;
  std::vector<MemorySample> samples;
  int64_t planned_bytes = 0;  // the peak that was planned; 0: unknown
  int64_t limit_bytes = 0;    // what the rank may use; 0: no limit
};

struct Timeline {
  std::string title;
  bool simulated = false;               // nothing was measured
  std::vector<std::string> rank_names;  // by rank: "rank 0 (cpu)", or empty
  std::vector<Span> spans;              // any order
  std::vector<RankMemory> memory;       // of ranks that were measured, by rank
};

}  // namespace echelon
