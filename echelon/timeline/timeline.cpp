#include "echelon/timeline/timeline.h"

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>

#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/timeline/intervals.h"
#include "echelon/timeline/pipeline_blocks.h"

namespace echelon::timeline {
namespace {

constexpr std::array<const char*, 7> kKindNames = {
    "forward", "backward",   "optimizer", "communication",
    "data",    "evaluation", "other"};

bool began_in(const Span& span, const Span& outer) {
  return span.begin_ns >= outer.begin_ns && span.begin_ns < outer.end_ns;
}

// The wait in `backward`; empty when there is none to add.
Interval
wait_in(const Span& backward, const std::vector<const Span*>& collectives) {
  Interval wait = {backward.begin_ns, backward.begin_ns};
  const auto first = std::ranges::lower_bound(
      collectives, backward.begin_ns, {}, &Span::begin_ns);
  for (auto it = first; it != collectives.end(); ++it) {
    if (!began_in(**it, backward)) break;
    if ((*it)->track == backward.track) return {};
    wait.begin = (*it)->begin_ns;
    wait.end = std::max(wait.end, (*it)->end_ns);
  }
  wait.end = std::min(wait.end, backward.end_ns);
  return wait;
}

}  // namespace

const char* span_kind_name(SpanKind kind) {
  return kKindNames[static_cast<size_t>(kind)];
}

SpanKind span_kind_from_name(const std::string& name) {
  for (size_t i = 0; i < kKindNames.size(); ++i) {
    if (name == kKindNames[i]) return static_cast<SpanKind>(i);
  }
  throw DataError(format(
      "[timeline] '{}' is not a kind of span; known: {}", name,
      join(kKindNames, ", ")));
}

void add_backward_waits(std::vector<Span>& spans) {
  std::vector<const Span*> collectives;
  for (const auto& span : spans) {
    if (span.kind == SpanKind::communication) collectives.push_back(&span);
  }
  std::ranges::sort(collectives, {}, &Span::begin_ns);
  std::vector<Span> waits;
  for (const auto& span : spans) {
    if (span.kind != SpanKind::backward) continue;
    // A pipeline's backward sends as it ends; it waits outside of its spans.
    if (block_of_name(span.name)) continue;
    const Interval wait = wait_in(span, collectives);
    if (wait.begin >= wait.end) continue;
    Span added = span;
    added.name = "wait for gradients";
    added.kind = SpanKind::communication;
    added.begin_ns = wait.begin;
    added.end_ns = wait.end;
    added.bytes = 0;
    waits.push_back(std::move(added));
  }
  spans.insert(spans.end(), waits.begin(), waits.end());
}

std::string to_bytes(const RankSpans& spans) {
  using nlohmann::json;
  json rows = json::array();
  for (const auto& s : spans.spans) {
    rows.push_back(json::array(
        {s.begin_ns, s.end_ns, static_cast<int>(s.kind), s.track, s.name,
         s.step, s.bytes, s.axis}));
  }
  json samples = json::array();
  for (const auto& sample : spans.memory.samples) {
    samples.push_back(json::array({sample.time_ns, sample.memory.bytes}));
  }
  const auto bytes = json::to_msgpack(json::array(
      {spans.rank_name, spans.clock_offset_ns, std::move(rows),
       std::move(samples), spans.memory.planned_bytes,
       spans.memory.limit_bytes}));
  return {bytes.begin(), bytes.end()};
}

RankSpans rank_spans_of(int32_t rank, std::string_view bytes) {
  using nlohmann::json;
  try {
    const json all = json::from_msgpack(bytes);
    RankSpans result;
    result.rank = rank;
    result.rank_name = all.at(0).get<std::string>();
    result.clock_offset_ns = all.at(1).get<int64_t>();
    for (const auto& row : all.at(2)) {
      Span span;
      span.rank = rank;
      span.begin_ns = row.at(0).get<int64_t>();
      span.end_ns = row.at(1).get<int64_t>();
      const auto kind = row.at(2).get<size_t>();
      if (kind >= kKindNames.size()) {
        throw DataError(format("spans of rank {}: no kind {}", rank, kind));
      }
      span.kind = static_cast<SpanKind>(kind);
      span.track = row.at(3).get<std::string>();
      span.name = row.at(4).get<std::string>();
      span.step = row.at(5).get<int64_t>();
      span.bytes = row.at(6).get<int64_t>();
      span.axis = row.at(7).get<std::string>();
      result.spans.push_back(std::move(span));
    }
    for (const auto& row : all.at(3)) {
      MemorySample sample{.time_ns = row.at(0).get<int64_t>()};
      sample.memory.bytes = row.at(1).get<decltype(sample.memory.bytes)>();
      result.memory.samples.push_back(sample);
    }
    result.memory.planned_bytes = all.at(4).get<int64_t>();
    result.memory.limit_bytes = all.at(5).get<int64_t>();
    return result;
  } catch (const nlohmann::json::exception& error) {
    throw DataError(format("spans of rank {}: {}", rank, error.what()));
  }
}

std::string last_step_file(int32_t rank) {
  return format("{}/rank-{}.msgpack", kLastStepFolder, rank);
}

Timeline merge_spans(std::vector<RankSpans> ranks, std::string title) {
  Timeline timeline;
  timeline.title = std::move(title);
  std::set<int32_t> seen;
  int64_t origin = std::numeric_limits<int64_t>::max();
  for (auto& rank : ranks) {
    if (!seen.insert(rank.rank).second) {
      throw DataError(format(
          "[timeline] there are two files of rank {}; each rank writes one",
          rank.rank));
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
    timeline.rank_names.push_back(format("rank {}", rank));
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
  std::ranges::sort(timeline.memory, {}, &RankMemory::rank);
  trim_receives(timeline);
  std::ranges::stable_sort(timeline.spans, {}, [](const Span& span) {
    return std::tuple(span.begin_ns, span.rank, -span.end_ns);
  });
  return timeline;
}

}  // namespace echelon::timeline
