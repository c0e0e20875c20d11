// Whether a job whose ranks failed is started again.
//
// Pure, as Policy: outcomes in, verdicts out.
#pragma once

#include <cstdint>
#include <optional>

#include "echelon/launch/cause.h"

namespace echelon::launch {

class Restarts {
 public:
  /// After so many restarts in a row that brought the job no further, another
  /// one would not help.
  static constexpr int kMostWithoutProgress = 3;

  enum class Verdict { end, restart, stuck };

  /// `most`: restarts of the job.
  explicit Restarts(int most) : most_(most) {}

  /// Whether a rank that ended with `exit_code` may do better in another
  /// process. False for what a user must mend (configuration, data, numbers)
  /// and for ranks that were asked to stop.
  static bool helps(int exit_code);
  /// Whether there is a restart left.
  bool left() const { return count_ < most_; }

  /// The job ended. `step`: the last step that a restart would not repeat; none
  /// when it is not known, so that `most` alone limits restarts. The verdict is
  /// `stuck` after kMostWithoutProgress restarts that brought no new step.
  /// `lost_host`: that was why; it does not count, and there is always another
  /// restart.
  Verdict on_end(
      const Outcome& outcome, std::optional<int64_t> step,
      bool lost_host = false);
  /// Restarts so far.
  int count() const { return count_; }

 private:
  const int most_;
  std::optional<int64_t> step_;  // of the generation before
  int count_ = 0;
  int without_progress_ = 0;
};

}  // namespace echelon::launch
