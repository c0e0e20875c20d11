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
