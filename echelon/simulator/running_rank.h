// One rank in a step: its clock, its place in its program, what it waits for,
// and what its time went to.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "echelon/simulator/rank_program.h"

namespace echelon::simulator {

/// Collectives that a rank launched in the background: one after the other on
/// each stream.
class Background {
 public:
  explicit Background(int16_t num_tags)
      : tags_(static_cast<size_t>(num_tags)) {}

  /// True: it is alone on its stream and may begin.
  bool launch(const Instruction& instruction, double now);

  /// The oldest instruction of `stream` that has not ended, and when it may
  /// begin.
  struct Oldest {
    const Instruction* instruction = nullptr;  // null: there is none
    double time = 0;
  };
  Oldest oldest(size_t stream) const;

  /// Ends the oldest instruction, which ran from `start` to `end`.
  const Instruction& finish_oldest(size_t stream, double start, double end);

  /// Whether everything that `wait` (or wait_all) waits for has ended.
  bool done(const Instruction& wait) const;

  /// What `wait` waited for: the instruction that ended last, and the seconds
  /// that all of them took since the last wait for them.
  struct Ended {
    const Instruction* last = nullptr;  // null: nothing was launched
    double end = 0;
    double seconds = 0;
  };
  Ended take(const Instruction& wait);

 private:
  struct Posted {
    const Instruction* instruction;
    double time;
  };
  struct Tag {
    const Instruction* instruction = nullptr;  // its last launch
    size_t in_flight = 0;
    double end = 0;      // of the last launch that ended
    double seconds = 0;  // of its launches since the last wait for them
  };

  Tag& tag_of(const Instruction& instruction) {
    return tags_[static_cast<size_t>(instruction.tag)];
  }

  std::vector<Tag> tags_;
  std::array<std::deque<Posted>, kNumStreams> posted_;
  std::array<double, kNumStreams> free_{};
  size_t in_flight_ = 0;
};

/// How one rank class spent a step, in seconds.
struct RankStep {
  std::array<double, kNumWorks> work{};
  std::vector<double> exposed;        // blocked in collectives, by axes
  std::vector<double> communication;  // in all, by axes; last the pipeline
  double pipeline = 0;                // waiting for messages of other stages
  double sending = 0;                 // blocked while sending
  double begin = 0;                   // of its first action
  double end = 0;

  /// From its first action to its end.
  double own_seconds() const { return end - begin; }
};

struct RunningRank {
  static constexpr double kNotYet = -1;

  /// `num_cells`: messages that may arrive; `num_axes`: axes of its
  /// collectives.
  RunningRank(const Program& program, size_t num_cells, size_t num_axes);

  void begin(const Instructions& instructions);
  /// `factor`: how much longer it takes than the instruction says.
  void compute(const Instruction& instruction, double factor);
  /// Waits for the pipeline's message that arrived at `time`.
  void wait_until(double time);
  /// Waits for the collective that moved data from `start` to `end`.
  void block_until(const Instruction& collective, double start, double end);
  /// Ends `wait`, whose launches have ended. They slowed the computation down
  /// by `slowdown` of their seconds.
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
