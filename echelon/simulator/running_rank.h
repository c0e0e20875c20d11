// One rank in a step: its clock, where it stands in its program, what it waits
// for, and what its time went to.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "echelon/simulator/background.h"
#include "echelon/simulator/rank_program.h"

namespace echelon::simulator {

/// What one rank class did with a step, in seconds.
struct RankStep {
  std::array<double, kNumWorks> work{};
  std::vector<double>
      exposed;  // by axes of the classes: standing still for them
  std::vector<double> communication;  // by axes, and last the pipeline: in all
  double pipeline = 0;                // waiting for messages of other stages
  double sending = 0;  // standing still for them (blocking_messages)
  double begin = 0;    // its first action
  double end = 0;

  /// From its first action to its end.
  double own_seconds() const { return end - begin; }
};

struct RunningRank {
  static constexpr double kNotYet = -1;

  /// `num_cells`: messages that may arrive; `num_axes`: that it meets others
  /// along.
  RunningRank(const Program& program, size_t num_cells, size_t num_axes);

  void begin(const Instructions& instructions);
  /// `factor`: how much longer than the instruction says.
  void compute(const Instruction& instruction, double factor);
  /// Until the message of the pipeline that arrived at `time`.
  void wait_until(double time);
  /// Until the collective that moved from `start` to `end`.
  void stand_until(const Instruction& collective, double start, double end);
  /// Ends `wait`, which is over, with what it was for: computing beside it was
  /// slowed by `slowdown` of its seconds.
  Background::Ended end_wait(const Instruction& wait, double slowdown);

  double now = 0;
  size_t action = 0;                   // in the schedule's list
  const Instructions* list = nullptr;  // being run; null: between actions
  size_t at = 0;                       // in `list`
  double began = 0;                    // `list`
  bool finishing = false;              // after the last action
  bool done = false;
  const Instruction* waits_for = nullptr;  // wait or wait_all
  ptrdiff_t waits_for_cell = -1;           // of arrivals
  std::vector<double> arrivals;  // by local stage, microbatch and direction
  Background background;
  RankStep sums;
};

}  // namespace echelon::simulator
