// The memory that the ranks of one host share: doorbells, a status page per
// rank, the verdict that ends everything, and blocks for groups that come and
// go.
//
// It is an anonymous file (memfd) without a name in /dev/shm, so nothing is
// left behind and a container's small tmpfs does not matter. It reserves 256
// GiB of addresses; memory is taken as it is touched, and given back with its
// group.
//
// Processes map it at different addresses, so it holds offsets, never pointers.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace echelon::local {

inline constexpr int kMaxRanks = 1024;
inline constexpr size_t kPage = 4096;

// How a thread waits: 64 pauses of the CPU (24 ns each), some yields, then it
// sleeps in the kernel. More pauses are no faster on a free core and ruin a
// crowded one; yields do not. Waking a sleeper takes its peer 10 us and leaves
// the caches cold, so the thread that computes next yields for 1 ms before it
// sleeps. The progress thread yields a few times only.
inline constexpr int kSpins = 64;
inline constexpr int kYields = 8;
inline constexpr std::chrono::milliseconds kYieldingOfCaller{1};
/// A sleeper with something pending wakes this often: for its deadline, and for
/// a peer that died between changing a word and ringing.
inline constexpr std::chrono::milliseconds kSleepLimit{50};

/// One step of the idle loop before sleeping. False: it is time to sleep.
bool idle_step(int& idle);

/// A word in shared memory that a rank's threads sleep on. A sleeper announces
/// itself, looks again whether there is work, and only then sleeps; whoever
/// makes work changes the word first and rings after. So no ring is lost.
struct alignas(128) Doorbell {
  enum : uint32_t { awake = 0, idle = 1, expecting = 2 };  // see engine.cpp

  std::atomic<uint32_t> rings{0};
  std::atomic<uint32_t> sleepers{0};

  /// Sleeps unless rings != seen; at most `limit` (zero: no limit).
  void sleep(uint32_t seen, std::chrono::milliseconds limit);
  void ring();
};

/// Why no operation may continue. There is one for the host and one per group;
/// the first verdict counts.
struct alignas(128) Verdict {
  enum class Kind : uint32_t { none, lost, timeout, aborted };

  std::atomic<uint32_t> state{0};  // 0 none, 1 being written, 2 readable
  std::atomic<uint32_t> kind{0};
  std::atomic<uint32_t> length{0};
  std::atomic<uint64_t> sequence{0};
  std::atomic<uint64_t> missing[kMaxRanks / 64];  // bits of ranks
  std::atomic<uint64_t> text[128];

  bool passed() const { return state.load(std::memory_order_seq_cst) != 0; }
  /// True when this call was the first.
  bool pass(
      Kind what, uint64_t at_sequence, const std::vector<int>& missing_ranks,
      std::string_view why);
  /// Waits while the verdict is being written.
  void read(
      Kind& what, uint64_t& at_sequence, std::vector<int>& missing_ranks,
      std::string& why) const;
};

/// One rank's line for others to read when it hangs.
struct alignas(kPage) StatusPage {
  static constexpr size_t kWords = kPage / 8 - 2;
  std::atomic<uint64_t> version{0};  // odd while it is written
  std::atomic<uint64_t> length{0};
  std::atomic<uint64_t> words[kWords];

  void publish(std::string_view text);  // one writer at a time
  std::string read() const;
};

struct alignas(128) RankBlock {
  Doorbell engine;   // the progress thread sleeps here
  Doorbell waiters;  // threads in Operation::wait sleep here
  std::atomic<int64_t> pid{0};
  std::atomic<uint64_t> pid_namespace{0};  // processes only
  std::atomic<uint32_t> left{0};           // 1: on purpose, 2: lost
  /// Processes only: the kernel marks it when the owner dies.
  alignas(128) std::atomic<uint32_t> alive{0};
};

/// A group's place in the segment.
struct GroupSlot {
  uint64_t offset = 0;
  int index = 0;
};

class Segment {
 public:
  /// Makes the memory file for `size` ranks.
  static std::shared_ptr<Segment> create(int size);
  /// Maps a peer's memory file; takes ownership of the descriptor.
  static std::shared_ptr<Segment> attach(int descriptor);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int size() const;
  int descriptor() const { return descriptor_; }
  RankBlock& rank(int r) const;
  StatusPage& status(int r) const;
  Verdict& verdict() const;
  char* at(uint64_t offset) const { return base_ + offset; }

  /// Wakes everything that sleeps, on every rank.
  void ring_all() const;

  /// The block of the group named `key` (the same on its `members` ranks). The
  /// first to ask makes it, zeroed; the last to leave releases it.
  GroupSlot join_group(const std::string& key, int members, size_t bytes);
  /// `on_last` runs on the last member, before the block is released.
  void leave_group(const GroupSlot& slot, const std::function<void()>& on_last);

  /// Zeroed memory of the segment, a multiple of a page.
  uint64_t allocate(size_t bytes);
  void release(uint64_t offset, size_t bytes);

 private:
  struct Header;
  Segment(int descriptor, char* base) : descriptor_(descriptor), base_(base) {}
  Header& header() const;
  class Lock;
  uint64_t take(size_t bytes);  // with the lock held

  int descriptor_;
  char* base_;
};

}  // namespace echelon::local
