#include "echelon/simulator/rank_program.h"

#include <cmath>

namespace echelon::simulator {
namespace {

std::vector<int32_t> local_numbers(const Schedule& schedule) {
  std::vector<int32_t> local(static_cast<size_t>(schedule.num_stages()));
  for (int32_t p = 0; p < schedule.num_ranks(); ++p) {
    int32_t next = 0;
    for (const int32_t stage : schedule.stages_of(p)) {
      local[static_cast<size_t>(stage)] = next++;
    }
  }
  return local;
}

std::vector<Position>
positions_in(const std::vector<Action>& list, size_t num_stages) {
  std::vector<Position> positions(list.size());
  std::vector<bool> forward(num_stages), backward(num_stages);
  std::vector<ptrdiff_t> last(num_stages, -1);
  for (size_t i = 0; i < list.size(); ++i) {
    const auto stage = static_cast<size_t>(list[i].stage);
    const ActionKind kind = list[i].kind;
    if (kind != ActionKind::backward_weight) {
      auto& seen = kind == ActionKind::forward ? forward : backward;
      positions[i].first = !seen[stage];
      seen[stage] = true;
    }
    if (kind == ActionKind::backward || kind == ActionKind::backward_weight) {
      last[stage] = static_cast<ptrdiff_t>(i);
    }
  }
  for (const ptrdiff_t i : last) {
    if (i >= 0) positions[static_cast<size_t>(i)].last = true;
  }
  return positions;
}

}  // namespace

SchedulePositions positions_of(const Schedule& schedule) {
  SchedulePositions all{.local = local_numbers(schedule), .actions = {}};
  for (const auto& list : schedule.ranks) {
    all.actions.push_back(positions_in(list, all.local.size()));
  }
  return all;
}

void add_compute(Instructions& list, Work work, double seconds) {
  if (seconds <= 0) return;
  if (list.empty() || list.back().kind != Instruction::Kind::compute) {
    list.emplace_back();
  }
  Instruction& last = list.back();
  last.seconds[static_cast<size_t>(work)] += seconds;
  last.spread_seconds = std::hypot(last.spread_seconds, seconds);
}

void append(Instructions& list, const Instructions& more) {
  for (const Instruction& one : more) {
    const bool merges = one.kind == Instruction::Kind::compute &&
                        !list.empty() &&
                        list.back().kind == Instruction::Kind::compute;
    if (!merges) {
      list.push_back(one);
      continue;
    }
    Instruction& last = list.back();
    for (size_t work = 0; work < kNumWorks; ++work) {
      last.seconds[work] += one.seconds[work];
    }
    last.spread_seconds = std::hypot(last.spread_seconds, one.spread_seconds);
  }
}

}  // namespace echelon::simulator
