#include "echelon/simulator/running_rank.h"

#include <algorithm>

namespace echelon::simulator {

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

// What ran in the background was not free: it took a share of the device.
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
