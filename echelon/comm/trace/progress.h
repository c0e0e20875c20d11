// How far each rank of a host has come, in memory that its launcher reads, so
// that a job that hangs is found although all its processes live.
//
//   launcher                                  rank
//   ProgressBoard board(num_ranks);
//   ECHELON_PROGRESS = board.path()      ->   ProgressMark mark(path,
//   local_rank); board.read() history.count_into(…);
//                                             mark.advance();
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace echelon {

struct RankProgress {
  uint64_t count = 0;        // grows with everything that the rank has done
  uint64_t collectives = 0;  // that it has issued
  /// The rank is in a step, where it should soon come further. False while it
  /// starts, reads data, evaluates or saves, which may take any time.
  bool watched = false;
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
  /// Before other processes take the ranks' places.
  void clear();

 private:
  friend class ProgressMark;
  struct alignas(64) Page {
    std::atomic<uint64_t> count;
    std::atomic<uint64_t> collectives;
    std::atomic<bool> watched;
  };

  size_t num_ranks_;
  int fd_ = -1;
  Page* pages_ = nullptr;
  std::string path_;
};

/// A rank's side. One thread calls it.
class ProgressMark {
 public:
  /// An empty path: nobody reads. A path that cannot be opened is taken for
  /// one, since a job that is not watched is better than none.
  ProgressMark(const std::string& path, int local_rank);
  ~ProgressMark();
  ProgressMark(const ProgressMark&) = delete;
  ProgressMark& operator=(const ProgressMark&) = delete;

  /// The rank has come further in a step.
  void advance();
  /// What follows may take any time.
  void pause();
  /// Where the launcher looks for the number of collectives; null: nobody does.
  std::atomic<uint64_t>* collectives();

 private:
  ProgressBoard::Page* pages_ = nullptr;
  size_t rank_ = 0;
};

}  // namespace echelon
