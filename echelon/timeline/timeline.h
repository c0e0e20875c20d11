// What each rank did when: the one type for measured and simulated runs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace echelon {

/// What a span of time was spent on; pictures colour by it.
enum class SpanKind {
  forward,
  backward,
  optimizer,
  communication,
  data,        // waiting for the next batch
  evaluation,
  other,
};

/// One stretch of work of one rank. Times are nanoseconds since the timeline's
/// origin, which all ranks share.
struct Span {
  int32_t rank = 0;
  std::string track;      // lane within the rank: "compute", "comm", "loader"
  std::string name;       // "forward", "all_reduce bucket 0"
  SpanKind kind = SpanKind::other;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  int64_t step = -1;      // training step, -1 when outside of one
  int64_t bytes = 0;      // moved by a collective, else 0
};

struct Timeline {
  std::string title;
  std::vector<std::string> rank_names;  // one per rank: "rank 0 (cpu)"
  std::vector<Span> spans;              // any order
};

}  // namespace echelon
