// What a rank does in a step, as instructions: seconds of computing, and the
// collectives between them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
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
  CollectiveKind collective = CollectiveKind::all_reduce;
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
  /// By kind of action and position, an index into Program::passes.
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

}  // namespace echelon::simulator
