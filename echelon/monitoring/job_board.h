// What a launcher knows of its job, in memory that it shares with its exporter.
//
// The launcher writes and never waits; the exporter, another process, reads. A
// reader may see a change half done: each figure is right by itself.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "echelon/comm/trace/progress.h"

namespace echelon::monitoring {

/// Why ranks were started again.
enum class RestartReason {
  rank_failed,
  rank_hung,
  rank_killed,  // from outside
  out_of_memory,
  host_lost,
  hosts_changed,  // some came or left
  resized         // somebody asked for another number of ranks
};
inline constexpr size_t kNumRestartReasons = 7;
/// "rank_failed"
std::string to_string(RestartReason reason);

/// Counts of durations, those up to each bound apart.
struct Durations {
  std::vector<double> bounds;     // seconds, rising
  std::vector<uint64_t> numbers;  // one more: beyond the last bound
  double sum = 0;                 // seconds

  Durations() : Durations(std::vector<double>()) {}
  explicit Durations(std::vector<double> bounds);
  void add(double seconds);
};

inline constexpr std::array kRecoveryBounds = {
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0};

/// A copy of the board.
struct JobFacts {
  struct Rank {
    int number = 0;  // of the job
    pid_t pid = 0;
    bool up = false;
    RankProgress progress;
  };
  std::vector<Rank> ranks;   // of this host
  bool coordinates = false;  // this launcher speaks for the whole job
  int world_size = 0;
  int num_hosts = 0;
  int generation = 0;
  std::array<uint64_t, kNumRestartReasons> restarts{};
  Durations recoveries;
  std::string failure;           // the last one, in a line; empty: none
  std::optional<int> exit_code;  // of the launcher, which ends with it
  /// How long its first rank stood still for checkpoints since the launcher
  /// started, in seconds.
  double checkpoint_seconds = 0;
  /// How long a step takes at the devices' peak; 0: not known.
  double peak_seconds = 0;
  /// CUDA_VISIBLE_DEVICES of this host's ranks; none: the launcher's own.
  std::optional<std::string> visible_gpus;
};

class JobBoard {
 public:
  using Clock = std::chrono::steady_clock;

  /// For at most so many ranks on this host. Throws Error when the system
  /// refuses the memory.
  explicit JobBoard(int most_ranks);
  ~JobBoard();
  JobBoard(const JobBoard&) = delete;
  JobBoard& operator=(const JobBoard&) = delete;

  // The launcher's side.

  struct Generation {
    int number = 0;
    int first_rank = 0;
    int num_ranks = 0;  // on this host
    int world_size = 0;
    int num_hosts = 1;
    bool coordinates = true;
    /// JobFacts::visible_gpus, of which the first 4 KiB are kept.
    std::optional<std::string> visible_gpus;
  };
  /// No rank is up until it has started.
  void begin(const Generation& generation);
  /// `rank`: of this host, from 0.
  void rank_started(int rank, pid_t pid);
  void rank_ended(int rank);
  /// Also ends a recovery, when a rank has made progress.
  void set_progress(const std::vector<RankProgress>& ranks);
  /// Of the generation.
  void set_peak_seconds(double seconds);
  void count_restart(RestartReason reason);
  /// Training stops, by a failure or a change: from here to the next progress
  /// it recovers. Of several calls the first counts.
  void stop_training();
  /// What went wrong, in a line, of which the first bytes are kept.
  void note_failure(const std::string& line);
  /// The job is over.
  void end(int exit_code);

  // The exporter's.

  JobFacts read() const;

 private:
  struct Slot {
    std::atomic<pid_t> pid;
    std::atomic<bool> up;
    std::atomic<uint64_t> count;
    std::atomic<uint64_t> collectives;
    std::atomic<RankPhase> phase;
  };
  struct Shared;

  Shared& shared() const { return *shared_; }
  Slot* slots() const;
  int kept_ranks(int num_ranks) const;

  int most_ranks_;
  size_t bytes_;
  Shared* shared_ = nullptr;
  // The launcher's alone.
  bool recovers_ = false;
  bool began_ = false;               // the generation after stop_training()
  uint64_t seen_checkpoint_ns_ = 0;  // of the first rank's process
  Clock::time_point stopped_{};
};

}  // namespace echelon::monitoring
