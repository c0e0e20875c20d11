// Every rank shows its status to the others; a hang report tells what the ranks
// that did not come to a collective did last.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "echelon/comm/trace/record.h"

namespace echelon {

/// One call as the board shows it. Plain bytes: it is copied between processes.
struct StatusEntry {
  uint64_t sequence = 0;
  std::array<char, 24> operation = {};
  std::array<char, 24> axis = {};
  std::array<char, 64> label = {};

  StatusEntry() = default;
  explicit StatusEntry(const CollectiveRecord& record);
  /// `all_gather "layer3" (#118)`
  std::string describe() const;
};

/// The status of one rank.
struct RankStatus {
  static constexpr size_t kGroups = 24;

  uint64_t num_finished = 0;
  uint64_t num_running = 0;
  StatusEntry last_finished;
  StatusEntry last_begun;
  // The number of collectives begun, by the group's number in the world.
  std::array<uint64_t, kGroups> begun = {};
};

/// Thread-safe. A rank publishes its own status and reads the others'.
class StatusBoard {
 public:
  virtual ~StatusBoard() = default;
  virtual void publish(int rank, const RankStatus& status) = 0;
  /// Nothing when the rank has not published a status yet. Throws CommError
  /// when what holds the board hangs.
  virtual std::optional<RankStatus> read(int rank) = 0;
};

/// For ranks that are threads of one process.
class MemoryBoard : public StatusBoard {
 public:
  explicit MemoryBoard(int size) : slots_(static_cast<size_t>(size)) {}
  void publish(int rank, const RankStatus& status) override;
  std::optional<RankStatus> read(int rank) override;

 private:
  std::mutex mutex_;
  std::vector<std::optional<RankStatus>> slots_;
};

/// The status as bytes, and back; nothing when the bytes are not a status.
std::string to_bytes(const RankStatus& status);
std::optional<RankStatus> status_from_bytes(const std::string& bytes);

/// The collective that a rank waits in.
struct WaitingCall {
  StatusEntry call;
  size_t group = 0;        // its number in the world
  std::vector<int> ranks;  // world ranks of the group
  int rank = 0;            // world rank of the waiting rank
  double waited_seconds = 0;
};

/// One sentence per rank of the group that has not arrived, e.g.
///   rank 2 last finished all_gather "layer3" (#118) and has not called
///   all_reduce "bucket 0" (#119) for 31 s
/// then the ranks that have. `statuses` are by position in waiting.ranks. Empty
/// when all have arrived.
std::string hang_report(
    const WaitingCall& waiting,
    const std::vector<std::optional<RankStatus>>& statuses);

}  // namespace echelon
