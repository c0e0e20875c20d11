#include "echelon/simulator/rank_program.h"

#include <algorithm>
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

bool Background::launch(const Instruction& instruction, double now) {
  auto& posted = posted_[static_cast<size_t>(instruction.stream)];
  Tag& tag = tag_of(instruction);
  tag.instruction = &instruction;
  ++tag.in_flight;
  ++in_flight_;
  posted.push_back({&instruction, now});
  return posted.size() == 1;
}

Background::Oldest Background::oldest(size_t stream) const {
  if (posted_[stream].empty()) return {};
  const Posted& posted = posted_[stream].front();
  return {posted.instruction, std::max(posted.time, free_[stream])};
}

const Instruction&
Background::finish_oldest(size_t stream, double start, double end) {
  const Instruction& instruction = *posted_[stream].front().instruction;
  posted_[stream].pop_front();
  free_[stream] = end;
  --in_flight_;
  Tag& tag = tag_of(instruction);
  --tag.in_flight;
  tag.end = end;
  tag.seconds += end - start;
  return instruction;
}

bool Background::done(const Instruction& wait) const {
  if (wait.kind == Instruction::Kind::wait_all) return in_flight_ == 0;
  return tags_[static_cast<size_t>(wait.tag)].in_flight == 0;
}

Background::Ended Background::take(const Instruction& wait) {
  Ended ended;
  const auto add = [&](Tag& tag) {
    if (!tag.instruction) return;
    ended.seconds += tag.seconds;
    tag.seconds = 0;
    if (ended.last && tag.end <= ended.end) return;
    ended.last = tag.instruction;
    ended.end = tag.end;
  };
  if (wait.kind == Instruction::Kind::wait_all) {
    for (Tag& tag : tags_) add(tag);
  } else {
    add(tag_of(wait));
  }
  return ended;
}

RunningRank::RunningRank(
    const Program& program, size_t num_cells, size_t num_axes)
    : arrivals(num_cells, kNotYet), background(program.num_tags) {
  sums.exposed.resize(num_axes);
  sums.communication.resize(num_axes + 1);
}

void RunningRank::begin(const Instructions& instructions) {
  list = &instructions;
  at = 0;
  began = now;
}

void RunningRank::compute(const Instruction& instruction, double factor) {
  for (size_t kind = 0; kind < kNumWorks; ++kind) {
    const double seconds = instruction.seconds[kind] * factor;
    sums.work[kind] += seconds;
    now += seconds;
  }
}

void RunningRank::wait_until(double time) {
  sums.pipeline += time - now;
  now = time;
}

void RunningRank::block_until(
    const Instruction& collective, double start, double end) {
  const auto axes = static_cast<size_t>(collective.group);
  sums.exposed[axes] += end - now;
  sums.communication[axes] += end - start;
  now = end;
}

// Background work takes a share of the device, so it slows what ran beside it.
Background::Ended
RunningRank::end_wait(const Instruction& wait, double slowdown) {
  const Background::Ended ended = background.take(wait);
  if (!ended.last) return ended;
  const double blocked = std::max(0.0, ended.end - now);
  const double slowed = slowdown * std::max(0.0, ended.seconds - blocked);
  sums.exposed[static_cast<size_t>(ended.last->group)] += blocked;
  sums.work[static_cast<size_t>(Work::memory)] += slowed;
  now += blocked + slowed;
  return ended;
}

}  // namespace echelon::simulator
