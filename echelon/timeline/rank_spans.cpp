#include "echelon/timeline/rank_spans.h"

#include <algorithm>
#include <limits>
#include <set>
#include <tuple>
#include <utility>

#include "echelon/error.h"
#include "echelon/timeline/pipeline_blocks.h"
#include "echelon/timeline/waits.h"

namespace echelon {

Timeline merge_spans(std::vector<RankSpans> ranks, std::string title) {
  Timeline timeline;
  timeline.title = std::move(title);
  std::set<int32_t> seen;
  int64_t origin = std::numeric_limits<int64_t>::max();
  for (auto& rank : ranks) {
    if (!seen.insert(rank.rank).second) {
      throw DataError(
          "[timeline] the spans of rank " + std::to_string(rank.rank) +
          " are there twice; each rank writes one file");
    }
    add_backward_waits(rank.spans);
    for (auto& span : rank.spans) {
      span.rank = rank.rank;
      span.begin_ns += rank.clock_offset_ns;
      span.end_ns += rank.clock_offset_ns;
      origin = std::min(origin, span.begin_ns);
    }
    if (rank.spans.empty() && !rank.memory.samples.empty()) {
      origin = std::min(
          origin, rank.memory.samples[0].time_ns + rank.clock_offset_ns);
    }
  }
  const size_t num_ranks = seen.empty() ? 0 : *seen.rbegin() + 1;
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    timeline.rank_names.push_back("rank " + std::to_string(rank));
  }
  for (auto& rank : ranks) {
    if (!rank.rank_name.empty()) {
      timeline.rank_names[rank.rank] = rank.rank_name;
    }
    for (auto& span : rank.spans) {
      span.begin_ns -= origin;
      span.end_ns -= origin;
      timeline.spans.push_back(std::move(span));
    }
    if (rank.memory.samples.empty()) continue;
    rank.memory.rank = rank.rank;
    for (auto& sample : rank.memory.samples) {
      sample.time_ns += rank.clock_offset_ns - origin;
    }
    timeline.memory.push_back(std::move(rank.memory));
  }
  std::sort(
      timeline.memory.begin(), timeline.memory.end(),
      [](const auto& a, const auto& b) { return a.rank < b.rank; });
  trim_receives(timeline);
  std::stable_sort(
      timeline.spans.begin(), timeline.spans.end(),
      [](const Span& a, const Span& b) {
        return std::tuple(a.begin_ns, a.rank, -a.end_ns) <
               std::tuple(b.begin_ns, b.rank, -b.end_ns);
      });
  return timeline;
}

}  // namespace echelon
