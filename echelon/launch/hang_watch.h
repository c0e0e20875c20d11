// Finds ranks that are alive and make no progress.
//
// Pure, as Policy: observations in, a verdict out. Only time in which the
// launcher looks counts: while it was stopped itself, or had no processor, it
// saw nothing.
//
// There are two rules. A rank that a signal has stopped (SIGSTOP) hangs unless
// it is continued within kStopped. And a job hangs when all its ranks are in a
// step, or an evaluation, and none makes progress for ten times the longest
// such pause among the last one to two thousand of that phase, or for `least`
// if that is longer. The first steps are slow: their pauses are forgotten after
// some others. Of a job on several hosts, this sees the ranks of one alone.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "echelon/comm/trace/progress.h"

namespace echelon::launch {

class HangWatch {
 public:
  using Milliseconds = std::chrono::milliseconds;
  static constexpr Milliseconds kStopped{3000};
  /// The longest time that counts between two looks.
  static constexpr Milliseconds kLook{100};

  struct Hang {
    int rank = 0;  // of this host, from 0: the one that the others wait for
    std::string text;
    /// How many the rank has issued; -1: whatever the other hosts' ranks do,
    /// this one hangs.
    int64_t collectives = -1;
  };

  HangWatch(int num_ranks, Milliseconds least);

  void on_stopped(int rank, const std::string& signal);
  void on_continued(int rank);
  /// `passed` since the last look. Returns a hang once it is sure.
  std::optional<Hang>
  look(const std::vector<RankProgress>& ranks, Milliseconds passed);

 private:
  struct Stopped {
    std::string signal;  // empty: the rank is not stopped
    Milliseconds time{0};
  };
  std::optional<Hang> find_stopped(Milliseconds passed);
  bool has_progress(const std::vector<RankProgress>& ranks);

  /// The pauses of a phase.
  struct Pauses {
    int64_t number = 0;
    bool now = false;          // a rank was in this phase at the last look
    Milliseconds of_first{0};  // the longest, forgotten soon
    Milliseconds before{0};    // of the thousand before
    Milliseconds since{0};     // of those since
    void learn(Milliseconds pause);
    Milliseconds longest() const;
  };
  Pauses& pauses_of(RankPhase phase);

  const Milliseconds least_;
  std::vector<Stopped> stopped_;
  std::vector<uint64_t> counts_;
  Milliseconds pause_{0};
  std::array<Pauses, 2> pauses_;
};

}  // namespace echelon::launch
