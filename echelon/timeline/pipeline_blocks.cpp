// A replay is a list schedule: each row keeps its order, and a block begins
// when its row is free and its inputs are ready. The rows are visited in turn,
// each going on until its next block lacks an input; when no row moves and
// blocks are left, the order has no valid replay.
//
// A real step has no record of which ranks form a pipeline. Ranks whose actions
// name the same stages are replicas of each other, and the n-th replica of each
// set of stages forms the n-th pipeline. A transfer is drawn where it was
// received if the receiver recorded it, since the receiver knows when it came.
#include "echelon/timeline/pipeline_blocks.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <deque>
#include <limits>
#include <map>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "echelon/text/format.h"
#include "echelon/timeline/intervals.h"

namespace echelon::timeline {
namespace {

constexpr std::string_view kLetters = "FBIWT";  // by kind

bool is_work(const PipelineBlock& block) {
  return block.kind != BlockKind::transfer;
}

bool is_number(const char* begin, const char* end, int32_t& value) {
  const auto [rest, error] = std::from_chars(begin, end, value);
  return error == std::errc() && rest == end && *begin != '-';
}

// --- What a block needs ----------------------------------------------------

// A result of a block: group, stage, microbatch, and which of the three.
enum class Result { output, input_gradient, weight_gradient };
using Key = std::tuple<int32_t, int32_t, int32_t, Result>;

struct Replay {
  std::map<Key, int> missing;   // the number of blocks that still give it
  std::map<Key, double> ready;  // when it is complete

  bool is_ready(const Key& key) const {
    const auto found = missing.find(key);
    return found == missing.end() || found->second == 0;
  }
  double time(const Key& key) const {
    const auto found = ready.find(key);
    return found == ready.end() ? 0 : found->second;
  }
};

Key result_of(const PipelineBlock& block, int32_t group) {
  switch (block.kind) {
    case BlockKind::forward:
      return {group, block.stage, block.microbatch, Result::output};
    case BlockKind::backward_weight:
      return {group, block.stage, block.microbatch, Result::weight_gradient};
    default:
      return {group, block.stage, block.microbatch, Result::input_gradient};
  }
}

std::vector<Key> needs_of(const PipelineBlock& block, int32_t group) {
  const auto [stage, microbatch] = std::pair(block.stage, block.microbatch);
  switch (block.kind) {
    case BlockKind::forward:
      return {{group, stage - 1, microbatch, Result::output}};
    case BlockKind::backward_weight:
      return {{group, stage, microbatch, Result::input_gradient}};
    default:
      return {
          {group, stage, microbatch, Result::output},
          {group, stage + 1, microbatch, Result::input_gradient}};
  }
}

}  // namespace

char letter(BlockKind kind) {
  return kLetters[static_cast<size_t>(kind)];
}

std::optional<PipelineBlock> block_of_name(const std::string& name) {
  const size_t at = name.find_first_of("FBIW");
  if (at == std::string::npos || at == 0 || at + 1 == name.size()) return {};
  PipelineBlock block;
  const char* text = name.data();
  if (!is_number(text, text + at, block.stage) ||
      !is_number(text + at + 1, text + name.size(), block.microbatch)) {
    return {};
  }
  block.kind = static_cast<BlockKind>(kLetters.find(name[at]));
  return block;
}

double first_begin(const std::vector<PipelineBlock>& blocks) {
  double begin = std::numeric_limits<double>::infinity();
  for (const auto& block : blocks) {
    if (is_work(block)) begin = std::min(begin, block.begin);
  }
  return std::isfinite(begin) ? begin : 0;
}

double makespan(const std::vector<PipelineBlock>& blocks) {
  double end = -std::numeric_limits<double>::infinity();
  for (const auto& block : blocks) {
    if (is_work(block)) end = std::max(end, block.end);
  }
  return std::isfinite(end) ? std::max(0.0, end - first_begin(blocks)) : 0;
}

std::vector<double>
busy_times(const std::vector<PipelineBlock>& blocks, size_t num_rows) {
  std::vector<std::vector<std::pair<double, double>>> times(num_rows);
  for (const auto& block : blocks) {
    if (!is_work(block) || block.row < 0) continue;
    if (static_cast<size_t>(block.row) >= num_rows) continue;
    times[static_cast<size_t>(block.row)].emplace_back(block.begin, block.end);
  }
  std::vector<double> busy(num_rows, 0);
  for (size_t row = 0; row < num_rows; ++row) {
    std::sort(times[row].begin(), times[row].end());
    double until = -std::numeric_limits<double>::infinity();
    for (const auto& [begin, end] : times[row]) {
      if (end <= until || !(begin < end)) continue;
      busy[row] += end - std::max(begin, until);
      until = end;
    }
  }
  return busy;
}

double
bubble_fraction(const std::vector<PipelineBlock>& blocks, size_t num_rows) {
  const double whole = makespan(blocks) * static_cast<double>(num_rows);
  if (!(whole > 0)) return 0;
  double busy = 0;
  for (const double time : busy_times(blocks, num_rows)) busy += time;
  return std::clamp(1 - busy / whole, 0.0, 1.0);
}

std::optional<std::vector<PipelineBlock>> replayed(
    const PipelineRows& measured,
    const std::function<double(const PipelineBlock&)>& duration) {
  std::vector<std::deque<PipelineBlock>> queues(measured.rows.size());
  Replay state;
  size_t left = 0;
  for (const auto& block : measured.blocks) {
    if (!is_work(block)) continue;
    queues.at(block.row).push_back(block);
    ++state.missing[result_of(block, measured.rows[block.row].group)];
    ++left;
  }
  for (auto& queue : queues) {
    std::ranges::stable_sort(queue, {}, &PipelineBlock::begin);
  }
  std::vector<double> now(queues.size(), 0);
  std::vector<PipelineBlock> result;
  result.reserve(left);
  for (bool moved = true; left > 0 && moved;) {
    moved = false;
    for (size_t row = 0; row < queues.size(); ++row) {
      const int32_t group = measured.rows[row].group;
      while (!queues[row].empty()) {
        PipelineBlock block = queues[row].front();
        const Key own = result_of(block, group);
        double begin = now[row];
        bool ready = true;
        for (const Key& need : needs_of(block, group)) {
          ready = ready && state.is_ready(need);
          begin = std::max(begin, state.time(need));
        }
        if (!ready) break;
        queues[row].pop_front();
        block.begin = begin;
        block.end = now[row] = begin + duration(block);
        --state.missing[own];
        state.ready[own] = std::max(state.time(own), block.end);
        result.push_back(std::move(block));
        --left;
        moved = true;
      }
    }
  }
  if (left > 0) return std::nullopt;
  return result;
}

PipelineRows whole_passes(const PipelineRows& measured) {
  PipelineRows whole{measured.rows, {}};
  std::map<std::tuple<int32_t, BlockKind, int32_t, int32_t>, size_t> seen;
  for (const auto& block : measured.blocks) {
    if (!is_work(block)) continue;
    const auto [at, is_new] = seen.try_emplace(
        {block.row, block.kind, block.stage, block.microbatch},
        whole.blocks.size());
    if (is_new) {
      whole.blocks.push_back(block);
      continue;
    }
    PipelineBlock& pass = whole.blocks[at->second];
    // A pass that waited is several blocks. Together they have the length that
    // it computed for.
    const double length = pass.end - pass.begin + block.end - block.begin;
    pass.begin = std::min(pass.begin, block.begin);
    pass.end = pass.begin + length;
  }
  return whole;
}

std::optional<std::vector<PipelineBlock>>
ideal_blocks(const PipelineRows& measured) {
  return replayed(whole_passes(measured), [](const PipelineBlock& block) {
    return block.kind == BlockKind::backward ? 2.0 : 1.0;
  });
}

// --- The spans of a real step ----------------------------------------------

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
  int32_t number = 0;
  const bool is_device =
      track.starts_with(kStart) && track.size() <= kStart.size() + 6 &&
      is_number(
          track.data() + kStart.size(), track.data() + track.size(), number);
  return is_device ? number : -1;
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
  // The first step is seldom typical: caches are empty and memory is new.
  if (steps.size() > 1) steps.erase(steps.begin());
  size_t most = 0;
  for (const auto& [number, step] : steps) most = std::max(most, step.count);
  std::vector<std::pair<int64_t, int64_t>> complete;  // length, step
  for (const auto& [number, step] : steps) {
    // A step with fewer spans than others was recorded in part.
    if (step.count < most) continue;
    complete.emplace_back(step.window.end - step.window.begin, number);
  }
  std::sort(complete.begin(), complete.end());
  return complete[(complete.size() - 1) / 2].second;
}

// The row of each rank: replicas follow each other, each with its ranks in the
// order of their stages.
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
    places.rows.push_back({format("rank {}", rank), group, rank});
  }
  return places;
}

void add_pieces(
    std::vector<PipelineBlock>& blocks, PipelineBlock block,
    const Intervals& pieces, int64_t origin) {
  for (const auto& piece : pieces) {
    block.begin = kSecondsPerNs * static_cast<double>(piece.begin - origin);
    block.end = kSecondsPerNs * static_cast<double>(piece.end - origin);
    blocks.push_back(block);
  }
}

// The action whose result a span of communication moves: "send_recv 0F3". A
// message with its shape goes ahead: "send_recv 0F3 shape".
std::optional<PipelineBlock> moved_by(const std::string& name) {
  std::string_view text = name;
  constexpr std::string_view kShape = " shape";
  if (text.ends_with(kShape)) text.remove_suffix(kShape.size());
  const size_t space = text.rfind(' ');
  return block_of_name(std::string(text.substr(space + 1)));
}

// Between stages, as far as its axis is known.
bool is_transfer(const Span& span) {
  return span.track == "comm" && span.kind == SpanKind::communication &&
         (span.axis.empty() || span.axis == "pp");
}

// The messages between ranks, as far as the actions of a step tell.
class Messages {
 public:
  explicit Messages(const std::vector<const Span*>& actions)
      : places_(places_of(actions)) {
    for (const Span* span : actions) {
      auto& end = ends_[key(span->rank, *block_of_name(span->name))];
      end = std::max(end, span->end_ns);
    }
  }

  const Places& places() const { return places_; }

  /// The rank has not the stage that sends.
  bool is_receive(const Span& span, const PipelineBlock& moved) const {
    const auto stages = places_.stages.find(span.rank);
    return stages != places_.stages.end() &&
           !stages->second.contains(moved.stage);
  }

  /// When the message was ready to be sent; 0 when that was not recorded.
  int64_t made_ns(const Span& span, const PipelineBlock& moved) const {
    if (!places_.row_of_rank.contains(span.rank)) return 0;
    const auto found = ends_.find(key(span.rank, moved));
    return found == ends_.end() ? 0 : found->second;
  }

  using Key = std::tuple<int32_t, BlockKind, int32_t, int32_t>;
  Key key(int32_t rank, const PipelineBlock& action) const {
    const int32_t row = places_.row_of_rank.at(rank);
    return {
        places_.rows[row].group, action.kind, action.stage, action.microbatch};
  }

 private:
  Places places_;
  std::map<Key, int64_t> ends_;
};

// A message is recorded by its sender and its receiver. The receiver knows when
// it came.
std::vector<const Span*>
transfers_in(const Timeline& timeline, int64_t step, const Messages& messages) {
  std::vector<const Span*> all;
  std::set<Messages::Key> received;
  for (const auto& span : timeline.spans) {
    if (span.step != step || !is_transfer(span) ||
        !messages.places().row_of_rank.contains(span.rank)) {
      continue;
    }
    all.push_back(&span);
    const auto moved = moved_by(span.name);
    if (moved && messages.is_receive(span, *moved)) {
      received.insert(messages.key(span.rank, *moved));
    }
  }
  std::erase_if(all, [&](const Span* span) {
    const auto moved = moved_by(span->name);
    return moved && !messages.is_receive(*span, *moved) &&
           received.contains(messages.key(span->rank, *moved));
  });
  return all;
}

void sort_blocks(std::vector<PipelineBlock>& blocks) {
  std::ranges::stable_sort(blocks, {}, [](const PipelineBlock& block) {
    return std::pair(block.row, block.begin);
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
      // Waits of ranks that share a layer are part of the pass.
      if (!moved_by(span.name)) continue;
      waits[span.rank].push_back({span.begin_ns, span.end_ns});
    } else if (is_action(span)) {
      actions.push_back(&span);
      window.begin = std::min(window.begin, span.begin_ns);
      window.end = std::max(window.end, span.end_ns);
    }
  }
  if (actions.empty()) return {};
  const Messages messages(actions);
  const Places& places = messages.places();
  PipelineRows result{places.rows, {}};
  for (const Span* span : actions) {
    PipelineBlock block = *block_of_name(span->name);
    const auto& stages = places.stages.at(span->rank);
    block.row = places.row_of_rank.at(span->rank);
    block.chunk = static_cast<int32_t>(
        std::distance(stages.begin(), stages.find(block.stage)));
    const Intervals whole = {{span->begin_ns, span->end_ns}};
    add_pieces(
        result.blocks, block, difference(whole, merged(waits[span->rank])),
        window.begin);
  }
  for (const Span* span : transfers_in(timeline, step, messages)) {
    PipelineBlock block;
    block.kind = BlockKind::transfer;
    block.row = places.row_of_rank.at(span->rank);
    block.name = span->name;
    add_pieces(
        result.blocks, block,
        intersection(merged({{span->begin_ns, span->end_ns}}), {window}),
        window.begin);
  }
  sort_blocks(result.blocks);
  return result;
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
    result.rows.push_back({format("device {}", device), group});
    ++stage;
  }
  sort_blocks(result.blocks);
  return result;
}

void trim_receives(Timeline& timeline) {
  std::map<int64_t, std::vector<const Span*>> steps;
  for (const auto& span : timeline.spans) {
    if (is_action(span)) steps[span.step].push_back(&span);
  }
  std::map<int64_t, Messages> messages;
  for (const auto& [step, actions] : steps) {
    messages.emplace(step, Messages(actions));
  }
  for (auto& span : timeline.spans) {
    const auto found = messages.find(span.step);
    if (!is_transfer(span) || found == messages.end()) continue;
    const auto moved = moved_by(span.name);
    if (!moved || !found->second.is_receive(span, *moved)) continue;
    const int64_t made = found->second.made_ns(span, *moved);
    // A receive is posted before the message exists; only from then on is
    // anything on its way.
    span.begin_ns = std::max(span.begin_ns, std::min(made, span.end_ns));
  }
}

}  // namespace echelon::timeline
