// What a rank does in a step, as instructions: seconds of computing, and the
// collectives between them.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "echelon/cost/operation.h"
#include "echelon/simulator/schedule_positions.h"

namespace echelon::simulator {

/// What computing is spent on.
enum class Work : uint8_t { matrix, memory, recompute, optimizer, other };
inline constexpr size_t kNumWorks = 5;

/// In the background, in order: parameters are gathered on one stream,
/// gradients are reduced on another.
enum class Stream : uint8_t { gather, reduce };
inline constexpr size_t kNumStreams = 2;

struct Instruction {
  enum class Kind : uint8_t {
    compute,     // `seconds` by kind of work
    collective,  // with the group along axes[group]; the rank stands still
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
  double spread_seconds =
      0;  // compute: root of the sum of squares of operations
  double collective_seconds = 0;  // alone on its links
  /// collective: the rank waits for the others; else for the transfer alone,
  /// where steps follow each other without all ranks' meeting.
  bool meets = true;
  double bytes = 0;  // of the whole tensor
};

using Instructions = std::vector<Instruction>;

/// Adds computing to the end of `list`; merges it with computing before it.
void add_compute(Instructions& list, Work work, double seconds);
/// Adds `more` to the end of `list`; computing that meets there becomes one.
void append(Instructions& list, const Instructions& more);

struct StageProgram {
  /// By kind of action and position, an index into Program::passes.
  std::array<std::array<int32_t, 4>, 4> pass{};
  double forward_bytes = 0;   // that go to the next stage
  double backward_bytes = 0;  // back to the one before
};

/// Of the ranks of one coordinate along pp that compute equally fast.
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
