#include "echelon/simulator/running_rank.h"

#include <algorithm>

namespace echelon::simulator {

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

void RunningRank::stand_until(
    const Instruction& collective, double start, double end) {
  const auto axes = static_cast<size_t>(collective.group);
  sums.exposed[axes] += end - now;
  sums.communication[axes] += end - start;
  now = end;
}

// What ran beside computing was not free: it took a part of the device.
Background::Ended
RunningRank::end_wait(const Instruction& wait, double slowdown) {
  const Background::Ended ended = background.take(wait);
  if (!ended.last) return ended;
  const double stood = std::max(0.0, ended.end - now);
  const double slowed = slowdown * std::max(0.0, ended.seconds - stood);
  sums.exposed[static_cast<size_t>(ended.last->group)] += stood;
  sums.work[static_cast<size_t>(Work::memory)] += slowed;
  now += stood + slowed;
  return ended;
}

}  // namespace echelon::simulator
