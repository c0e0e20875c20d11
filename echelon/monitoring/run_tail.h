// The figures of a run, from what rank 0 adds to its metrics.jsonl while it
// trains, and the age of its newest checkpoint.
//
// The file loses its last lines when training goes back to an earlier state,
// and others follow in their place. So the last lines are known by their text,
// and those that are no longer there have been lost.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "echelon/monitoring/job_board.h"

namespace echelon::monitoring {

/// What rank 0 spends its steps on, as metrics.jsonl names it, with "_seconds"
/// behind the name.
inline constexpr std::array<std::string_view, 5> kStepPhases = {
    "data", "forward", "backward", "communication", "update"};

/// Sums are of the lines since the tail was made.
struct RunFigures {
  // Of the newest step.
  std::optional<int64_t> step;
  std::optional<double> loss, grad_norm, learning_rate;  // may be NaN, infinite
  std::optional<double> samples_per_second, tokens_per_second;
  std::optional<double> newest_seconds;
  std::optional<int64_t> skipped_steps;  // so far, in the run

  int64_t steps = 0;       // also those that were done again
  int64_t lost_steps = 0;  // so many had to be done again
  Durations step_seconds;
  /// Of those, by kStepPhases; 0: not measured.
  std::array<double, kStepPhases.size()> phase_seconds{};
  double kept_seconds = 0;  // of steps that were not lost

  /// By the clock of the file system.
  std::optional<std::chrono::system_clock::time_point> checkpoint;
  /// How long that one took, where the file system tells.
  std::optional<double> checkpoint_seconds;
};

class RunTail {
 public:
  /// `folder`: of the run. What metrics.jsonl holds now was done before.
  explicit RunTail(std::filesystem::path folder);

  /// Reads what has come since. A file that cannot be read has nothing new.
  void poll();
  const RunFigures& figures() const { return figures_; }

 private:
  struct Line {
    int64_t begin = 0;
    int64_t size = 0;
    size_t hash = 0;
    bool counts = false;  // it is a step in the sums
    bool step = false;
    double seconds = 0;
  };

  void forget_lost_lines(int file, int64_t size);
  void take(std::string_view text);
  void take_line(std::string_view text);
  void look_at_checkpoints();

  const std::filesystem::path folder_;
  RunFigures figures_;
  std::deque<Line> lines_;   // the last ones
  int64_t read_ = 0;         // bytes of whole lines
  int64_t before_ = 0;       // the bytes that were there at first
  int64_t skipped_to_ = -1;  // lines up to this step are known already
  int64_t newest_ = -1;      // step
};

}  // namespace echelon::monitoring
