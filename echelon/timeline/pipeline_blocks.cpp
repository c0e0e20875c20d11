#include "echelon/timeline/pipeline_blocks.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <deque>
#include <limits>
#include <map>
#include <string_view>
#include <tuple>
#include <utility>

namespace echelon {
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
    std::stable_sort(queue.begin(), queue.end(), [](auto& a, auto& b) {
      return a.begin < b.begin;
    });
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

std::optional<std::vector<PipelineBlock>>
ideal_blocks(const PipelineRows& measured) {
  // The pieces of a block that waits interrupt become one block.
  PipelineRows whole{measured.rows, {}};
  std::map<std::tuple<int32_t, BlockKind, int32_t, int32_t>, size_t> seen;
  for (const auto& block : measured.blocks) {
    if (!is_work(block)) continue;
    const auto [at, is_new] = seen.try_emplace(
        {block.row, block.kind, block.stage, block.microbatch},
        whole.blocks.size());
    if (is_new) whole.blocks.push_back(block);
  }
  return replayed(whole, [](const PipelineBlock& block) {
    return block.kind == BlockKind::backward ? 2.0 : 1.0;
  });
}

}  // namespace echelon
