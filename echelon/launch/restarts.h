// Whether a job whose ranks failed is started again, and when.
//
// Pure, as Policy: outcomes in, decisions out. Each kind of failure has a
// budget of its own:
//
//   the program's    --max-restarts. A rank that hangs is one of them
//   from outside     none, as long as the job gets further: what a user or a
//                    scheduler kills says nothing about the program, and
//                    neither does a host that is lost
//   out of memory    one restart; then nothing has changed
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "echelon/launch/cause.h"

namespace echelon::launch {

class Restarts {
 public:
  /// After so many restarts in a row that brought the job no further, another
  /// one would not help, whatever the failures were.
  static constexpr int kMostWithoutProgress = 3;
  static constexpr int kMostForMemory = 1;
  static constexpr std::chrono::seconds kLongestWait{60};

  enum class Verdict { end, restart, stuck };

  struct Decision {
    Verdict verdict = Verdict::end;
    /// Before the restart: 1, 2, 4, … s, since the one before brought no new
    /// step.
    std::chrono::seconds wait{0};
    /// Of a restart: the budget that it counts against, "1 of 3
    /// (--max-restarts)". Else why there is none, where that needs words.
    std::string words;
  };

  /// `most`: restarts for failures of the program; 0: none for any failure.
  /// `elastic`: the job goes on without hosts that are lost, whatever `most`
  /// is.
  explicit Restarts(int most, bool elastic = false)
      : most_(most), elastic_(elastic) {}

  /// Whether a rank that ended with `exit_code` may do better in another
  /// process. False for what a user must mend (configuration, data, numbers)
  /// and for ranks that were asked to stop.
  static bool helps(int exit_code);
  /// Whether there is a restart left for such a failure.
  bool left(FailureKind kind) const;

  /// The job ended. `step`: the last step that a restart would not repeat; none
  /// when it is not known: then failures from outside count as the program's,
  /// since nothing shows that the job gets further. The verdict is `stuck`
  /// after kMostWithoutProgress restarts that brought no new step.
  Decision on_end(const Outcome& outcome, std::optional<int64_t> step);

 private:
  const int most_;
  const bool elastic_;
  std::optional<int64_t> step_;  // of the generation before
  int by_program_ = 0;           // restarts so far
  int from_outside_ = 0;
  int for_memory_ = 0;
  int without_progress_ = 0;
};

}  // namespace echelon::launch
