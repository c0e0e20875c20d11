// Where each rank shows what it is doing, so that the others can say it when it
// does not come.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace echelon {

/// One call as the board shows it. Plain bytes: it is copied between processes.
struct StatusEntry {
  uint64_t sequence = 0;
  std::array<char, 24> operation = {};
  std::array<char, 24> axis = {};
  std::array<char, 64> label = {};

  void
  set(uint64_t sequence, const std::string& operation, const std::string& axis,
      const std::string& label);
  /// `all_gather "layer3" (#118)`
  std::string describe() const;
};

/// What one rank shows.
struct RankStatus {
  static constexpr size_t kGroups = 24;

  uint64_t num_finished = 0;
  uint64_t num_running = 0;
  StatusEntry last_finished;
  StatusEntry last_begun;
  // For each group (by its number in the world): collectives begun.
  std::array<uint64_t, kGroups> begun = {};
};

/// Thread-safe. A rank publishes its own status and reads the others'.
class StatusBoard {
 public:
  virtual ~StatusBoard() = default;
  virtual void publish(int rank, const RankStatus& status) = 0;
  /// Nothing when the rank has not shown anything yet.
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

}  // namespace echelon
