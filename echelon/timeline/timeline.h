// What each rank did and when: one type for measured and simulated runs, and
// how the spans that ranks recorded become one timeline.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "echelon/timeline/memory_kind.h"

namespace echelon::timeline {

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
  /// By rank of a simulated layout: ranks of one class do the same, though
  /// spans are of some of them. Empty: not known.
  std::vector<int32_t> rank_classes;
};

/// What one rank recorded, in the steady clock of its host.
struct RankSpans {
  int32_t rank = 0;
  std::string rank_name;        // "rank 3 (cpu)"
  int64_t clock_offset_ns = 0;  // rank 0's clock minus ours; 0 on one host
  std::vector<Span> spans;
  RankMemory memory;  // without samples: not measured
};

/// As MessagePack, and back. Throws DataError for other bytes.
std::string to_bytes(const RankSpans& spans);
RankSpans rank_spans_of(int32_t rank, std::string_view bytes);

/// Where each rank that a page shows writes its newest recorded step while the
/// run trains, as such bytes: RUN/last_step/rank-3.msgpack.
inline constexpr const char* kLastStepFolder = "last_step";
std::string last_step_file(int32_t rank);

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

/// Makes one timeline from the spans of all ranks. Clocks are aligned, the
/// earliest begin is at 0, and spans are sorted by begin. Waits are added to
/// backward spans, and receives of a pipeline trimmed (pipeline_blocks.h).
/// Throws DataError when a rank is there twice. A missing rank has no spans and
/// the name "rank N".
Timeline merge_spans(std::vector<RankSpans> ranks, std::string title);

}  // namespace echelon::timeline
