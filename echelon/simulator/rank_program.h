// What a rank does in a step, as instructions (seconds of computing, and the
// collectives between them), and a rank that does it: its clock, its place in
// its program, what it waits for, and what its time went to.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "echelon/cost/operation.h"
#include "echelon/schedule/schedule.h"

namespace echelon::simulator {

/// Where an action stands among those of its kind and stage in a step. A
/// backward counts as last when no later one computes gradients of the stage's
/// weights.
struct Position {
  bool first = false;
  bool last = false;
  size_t number() const { return (first ? 1u : 0u) + (last ? 2u : 0u); }
};

struct SchedulePositions {
  /// By stage: its number among the stages of its rank, from 0.
  std::vector<int32_t> local;
  /// By coordinate along pp, for each action of its list.
  std::vector<std::vector<Position>> actions;
};

SchedulePositions positions_of(const Schedule& schedule);

/// What computing time is spent on.
enum class Work : uint8_t { matrix, memory, recompute, optimizer, other };
inline constexpr size_t kNumWorks = 5;

/// Background streams: all-gathers of parameters run in order on one,
/// reductions of gradients on the other.
enum class Stream : uint8_t { gather, reduce };
inline constexpr size_t kNumStreams = 2;

struct Instruction {
  enum class Kind : uint8_t {
    compute,     // `seconds` by kind of work
    collective,  // with the group along axes[group]; blocks the rank
    launch,      // the same, but in the background, on `stream`
    wait,        // for the last launch of `tag`
    wait_all,    // for everything that was launched
  };
  Kind kind = Kind::compute;
  Stream stream = Stream::gather;
  cost::CollectiveKind collective = cost::CollectiveKind::all_reduce;
  int16_t group = -1;  // index into RankClasses::axes
  int16_t tag = -1;    // of launch and wait, below Program::num_tags
  int32_t label = -1;  // of a collective, index into Program::labels
  std::array<double, kNumWorks> seconds{};  // compute
  /// compute: root of the sum of the squared seconds of its operations.
  double spread_seconds = 0;
  double collective_seconds = 0;  // alone on its links
  /// collective: the rank waits for the others. False where steps follow each
  /// other without a rendezvous of all ranks: it waits for the transfer alone.
  bool meets = true;
  double bytes = 0;  // of the whole tensor
};

using Instructions = std::vector<Instruction>;

/// Appends computing to `list`; merges it into computing at its end.
void add_compute(Instructions& list, Work work, double seconds);
/// Appends `more` to `list`; merges computing where the two meet.
void append(Instructions& list, const Instructions& more);

struct StageProgram {
  /// Indices into Program::passes, by kind of action and position.
  std::array<std::array<int32_t, 4>, 4> pass{};
  double forward_bytes = 0;   // sent to the next stage
  double backward_bytes = 0;  // sent back to the previous stage
};

/// The program of the ranks of one coordinate along pp that compute equally
/// fast.
struct Program {
  std::vector<Instructions> passes;
  std::vector<StageProgram> stages;  // of the rank, in ascending order
  Instructions begin;                // before the first action
  Instructions finish;               // after the last one
  std::vector<std::string> labels;   // "blocks input"
  int16_t num_tags = 0;

  const Instructions&
  pass(size_t stage, ActionKind kind, Position position) const {
    const auto which = static_cast<size_t>(kind);
    return passes[static_cast<size_t>(
        stages[stage].pass[which][position.number()])];
  }
};

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
