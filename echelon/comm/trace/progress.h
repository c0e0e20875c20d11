// The progress of the ranks of a host, in memory that their launcher reads: it
// finds a job that hangs although all its processes are alive.
//
//   launcher                             rank
//   ProgressBoard board(num_ranks);
//   ECHELON_PROGRESS = board.path()  ->  ProgressMark mark(path, local_rank);
//                                        history.count_into(mark.collectives());
//   board.read()                         mark.advance();
//                                        mark.add_checkpoint(seconds);
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace echelon {

/// What a rank does. It should soon make progress in a step and between the
/// batches of an evaluation. What else it does (it starts, reads data, saves)
/// may take any time.
enum class RankPhase : uint8_t { other, step, evaluation };

struct RankProgress {
  uint64_t count = 0;        // of its calls of advance()
  uint64_t collectives = 0;  // that it has issued
  RankPhase phase = RankPhase::other;
  uint64_t checkpoint_ns = 0;  // training stood still for checkpoints
};

/// The launcher's side.
class ProgressBoard {
 public:
  /// Throws Error when the system refuses the memory.
  explicit ProgressBoard(int num_ranks);
  ~ProgressBoard();
  ProgressBoard(const ProgressBoard&) = delete;
  ProgressBoard& operator=(const ProgressBoard&) = delete;

  /// For the variable ECHELON_PROGRESS of the ranks, which can open it while
  /// this process lives.
  const std::string& path() const { return path_; }
  std::vector<RankProgress> read() const;
  /// Resets all ranks: call it before other processes take their places.
  void clear();

 private:
  friend class ProgressMark;
  struct alignas(64) Slot {
    std::atomic<uint64_t> count;
    std::atomic<uint64_t> collectives;
    std::atomic<RankPhase> phase;
    std::atomic<uint64_t> checkpoint_ns;
  };

  size_t num_ranks_;
  int fd_ = -1;
  Slot* slots_ = nullptr;
  std::string path_;
};

/// A rank's side. One thread calls it.
class ProgressMark {
 public:
  /// With an empty path nobody reads. So it is with a path that cannot be
  /// opened: a job that is not watched is better than none.
  ProgressMark(const std::string& path, int local_rank);
  ~ProgressMark();
  ProgressMark(const ProgressMark&) = delete;
  ProgressMark& operator=(const ProgressMark&) = delete;

  /// The rank has made progress.
  void advance(RankPhase phase = RankPhase::step);
  /// Training stood still for so long for a checkpoint.
  void add_checkpoint(double seconds);
  /// What follows may take any time.
  void pause();
  /// Where the launcher looks for the number of collectives; null: nobody does.
  std::atomic<uint64_t>* collectives();

 private:
  ProgressBoard::Slot* slots_ = nullptr;
  size_t rank_ = 0;
};

}  // namespace echelon
