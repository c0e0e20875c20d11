// Finds ranks that are alive and make no progress.
//
// Pure, as Policy: observations in, a verdict out. Only time in which the
// launcher looks counts: while it was stopped itself, or had no processor, it
// saw nothing.
//
// There are two rules. A rank that a signal has stopped (SIGSTOP) hangs unless
// it is continued within kStopped. And a job hangs when all its ranks are in a
// step and none makes progress for ten times the longest such pause among the
// last one to two thousand, or for `least` if that is longer. The first steps
// are slow: their pauses are forgotten after some others.
#pragma once

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
  };

  HangWatch(int num_ranks, Milliseconds least);

  void on_stopped(int rank, const std::string& signal);
  void on_continued(int rank);
  /// `passed` since the last look. Returns a hang once it is sure.
  std::optional<Hang>
  look(const std::vector<RankProgress>& ranks, Milliseconds passed);
  /// Whether look() has found a job that makes no progress.
  bool found() const { return found_; }

 private:
  struct Stopped {
    std::string signal;  // empty: the rank is not stopped
    Milliseconds time{0};
  };
  std::optional<Hang> find_stopped(Milliseconds passed);
  bool has_progress(const std::vector<RankProgress>& ranks);
  void learn(Milliseconds pause);

  const Milliseconds least_;
  std::vector<Stopped> stopped_;
  std::vector<uint64_t> counts_;
  bool found_ = false;
  Milliseconds pause_{0};
  int64_t num_pauses_ = 0;
  Milliseconds longest_of_first_{0};  // forgotten soon
  Milliseconds longest_{0};           // of the thousand pauses before
  Milliseconds longest_of_these_{0};  // of those since
};

}  // namespace echelon::launch
