#include "echelon/simulator/rank_program.h"

#include <cmath>

namespace echelon::simulator {

void add_compute(Instructions& list, Work work, double seconds) {
  if (seconds <= 0) return;
  if (list.empty() || list.back().kind != Instruction::Kind::compute) {
    list.emplace_back();
  }
  Instruction& last = list.back();
  last.seconds[static_cast<size_t>(work)] += seconds;
  last.spread_seconds = std::hypot(last.spread_seconds, seconds);
}

}  // namespace echelon::simulator
