// Blocks from the spans of a real step; the rest of pipeline_blocks.h.
#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "echelon/timeline/intervals.h"
#include "echelon/timeline/pipeline_blocks.h"

namespace echelon {
namespace {

constexpr double kSecondsPerNs = 1e-9;

bool is_pass(const Span& span) {
  return span.kind == SpanKind::forward || span.kind == SpanKind::backward;
}

bool is_action(const Span& span) {
  return is_pass(span) && span.track == "compute" &&
         span.begin_ns < span.end_ns && block_of_name(span.name).has_value();
}

// "device 3" -> 3, else -1.
int32_t device_of(const std::string& track) {
  constexpr std::string_view kStart = "device ";
  if (!track.starts_with(kStart) || track.size() > kStart.size() + 6) return -1;
  int32_t number = 0;
  for (const char c : track.substr(kStart.size())) {
    if (c < '0' || c > '9') return -1;
    number = 10 * number + (c - '0');
  }
  return track.size() == kStart.size() ? -1 : number;
}

bool is_placed(const Span& span) {
  return is_pass(span) && span.begin_ns < span.end_ns &&
         device_of(span.track) >= 0;
}

template <class Belongs>
std::optional<int64_t>
typical_step(const Timeline& timeline, const Belongs& belongs) {
  struct Step {
    size_t count = 0;
    Interval window = {std::numeric_limits<int64_t>::max(), 0};
  };
  std::map<int64_t, Step> steps;
  for (const auto& span : timeline.spans) {
    if (span.step < 0 || !belongs(span)) continue;
    auto& step = steps[span.step];
    ++step.count;
    step.window.begin = std::min(step.window.begin, span.begin_ns);
    step.window.end = std::max(step.window.end, span.end_ns);
  }
  if (steps.empty()) return {};
  if (steps.size() > 1) steps.erase(steps.begin());
  size_t most = 0;
  for (const auto& [number, step] : steps) most = std::max(most, step.count);
  std::vector<std::pair<int64_t, int64_t>> complete;  // length, step
  for (const auto& [number, step] : steps) {
    if (step.count < most) continue;
    complete.emplace_back(step.window.end - step.window.begin, number);
  }
  std::sort(complete.begin(), complete.end());
  return complete[(complete.size() - 1) / 2].second;
}

// Row by rank: replicas one after another, in each the ranks by their stages.
struct Places {
  std::map<int32_t, int32_t> row_of_rank;
  std::map<int32_t, std::set<int32_t>> stages;  // by rank
  std::vector<PipelineRow> rows;
};

Places places_of(const std::vector<const Span*>& actions) {
  Places places;
  for (const Span* span : actions) {
    places.stages[span->rank].insert(block_of_name(span->name)->stage);
  }
  // Ranks with the same stages are replicas of each other, in rank order.
  std::map<std::set<int32_t>, int32_t> replicas;
  std::vector<std::tuple<int32_t, int32_t, int32_t>> order;
  for (const auto& [rank, stages] : places.stages) {
    order.emplace_back(replicas[stages]++, *stages.begin(), rank);
  }
  std::sort(order.begin(), order.end());
  for (const auto& [group, stage, rank] : order) {
    places.row_of_rank[rank] = static_cast<int32_t>(places.rows.size());
    places.rows.push_back({"rank " + std::to_string(rank), group});
  }
  return places;
}

void add_pieces(
    std::vector<PipelineBlock>& blocks,
    PipelineBlock block,
    const Intervals& pieces,
    int64_t origin) {
  for (const auto& piece : pieces) {
    block.begin = kSecondsPerNs * static_cast<double>(piece.begin - origin);
    block.end = kSecondsPerNs * static_cast<double>(piece.end - origin);
    blocks.push_back(block);
  }
}

std::vector<const Span*>
transfers_in(const Timeline& timeline, int64_t step, const Places& places) {
  std::vector<const Span*> result;
  for (const auto& span : timeline.spans) {
    if (span.step == step && span.track == "comm" &&
        span.kind == SpanKind::communication &&
        places.row_of_rank.contains(span.rank)) {
      result.push_back(&span);
    }
  }
  return result;
}

void sort_blocks(std::vector<PipelineBlock>& blocks) {
  std::stable_sort(blocks.begin(), blocks.end(), [](auto& a, auto& b) {
    return std::pair(a.row, a.begin) < std::pair(b.row, b.begin);
  });
}

}  // namespace

std::optional<int64_t> typical_pipeline_step(const Timeline& timeline) {
  return typical_step(timeline, is_action);
}

std::optional<int64_t> typical_placement_step(const Timeline& timeline) {
  return typical_step(timeline, is_placed);
}

PipelineRows pipeline_rows(const Timeline& timeline, int64_t step) {
  std::vector<const Span*> actions;
  std::map<int32_t, std::vector<Interval>> waits;
  Interval window = {std::numeric_limits<int64_t>::max(), 0};
  for (const auto& span : timeline.spans) {
    if (span.step != step || span.track != "compute") continue;
    if (span.kind == SpanKind::communication) {
      waits[span.rank].push_back({span.begin_ns, span.end_ns});
    } else if (is_action(span)) {
      actions.push_back(&span);
      window.begin = std::min(window.begin, span.begin_ns);
      window.end = std::max(window.end, span.end_ns);
    }
  }
  if (actions.empty()) return {};
  const Places places = places_of(actions);
  PipelineRows result{places.rows, {}};
  for (const Span* span : actions) {
    PipelineBlock block = *block_of_name(span->name);
    const auto& stages = places.stages.at(span->rank);
    block.row = places.row_of_rank.at(span->rank);
    block.chunk = static_cast<int32_t>(
        std::distance(stages.begin(), stages.find(block.stage)));
    const Intervals whole = {{span->begin_ns, span->end_ns}};
    add_pieces(
        result.blocks,
        block,
        difference(whole, merged(waits[span->rank])),
        window.begin);
  }
  for (const Span* span : transfers_in(timeline, step, places)) {
    PipelineBlock block;
    block.kind = BlockKind::transfer;
    block.row = places.row_of_rank.at(span->rank);
    block.name = span->name;
    add_pieces(
        result.blocks,
        block,
        intersection(merged({{span->begin_ns, span->end_ns}}), {window}),
        window.begin);
  }
  sort_blocks(result.blocks);
  return result;
}

std::vector<PipelineBlock>
measured_blocks(const Timeline& timeline, int64_t step) {
  return pipeline_rows(timeline, step).blocks;
}

PipelineRows placement_rows(const Timeline& timeline, int64_t step) {
  std::map<std::pair<int32_t, int32_t>, std::vector<const Span*>> devices;
  std::set<int32_t> ranks;
  int64_t origin = std::numeric_limits<int64_t>::max();
  for (const auto& span : timeline.spans) {
    if (span.step != step || !is_placed(span)) continue;
    devices[{span.rank, device_of(span.track)}].push_back(&span);
    ranks.insert(span.rank);
    origin = std::min(origin, span.begin_ns);
  }
  PipelineRows result;
  int32_t stage = 0;
  for (const auto& [place, spans] : devices) {
    const auto& [rank, device] = place;
    const auto group =
        static_cast<int32_t>(std::distance(ranks.begin(), ranks.find(rank)));
    if (result.rows.empty() || result.rows.back().group != group) stage = 0;
    for (const Span* span : spans) {
      PipelineBlock block = block_of_name(span->name).value_or(PipelineBlock{});
      if (block.microbatch < 0) {
        block.stage = stage;
        block.kind = span->kind == SpanKind::forward ? BlockKind::forward
                                                     : BlockKind::backward;
      }
      block.row = static_cast<int32_t>(result.rows.size());
      add_pieces(
          result.blocks, block, {{span->begin_ns, span->end_ns}}, origin);
    }
    result.rows.push_back({"device " + std::to_string(device), group});
    ++stage;
  }
  sort_blocks(result.blocks);
  return result;
}

}  // namespace echelon
