// How a rank waits: 64 pauses (24 ns each), some yields, then it sleeps in the
// kernel. More pauses are no faster on a free core and ruin a crowded one.
// Yields do not. A core that sleeps wakes late, and who wakes it pays: 10 us,
// and what it computes next finds its code out of the caches. So the thread
// that computes next yields for 1 ms, others for a moment.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace echelon::local {

inline constexpr int kSpins = 64;
inline constexpr int kYields = 8;
inline constexpr std::chrono::milliseconds kYieldingOfCaller{1};
/// A sleeper with something pending looks up this often: for its deadline, and
/// for a peer that died between changing a word and ringing.
inline constexpr std::chrono::milliseconds kNap{50};
/// The progress thread looks this often for operations that can wait for their
/// caller, and goes on doing so for some time after the last one.
inline constexpr std::chrono::milliseconds kDoze{10};
inline constexpr int kDozes = 10;

/// One step of the idle loop before sleeping. False: it is time to sleep.
bool idle_step(int& idle);

/// A word in shared memory that a rank's thread sleeps on. The sleeper
/// announces itself, looks again whether there is work, and only then sleeps;
/// whoever makes work changes it first and rings after. So no ring is lost.
struct alignas(128) Doorbell {
  enum : uint32_t { awake = 0, idle = 1, expecting = 2, dozing = 3 };

  std::atomic<uint32_t> rings{0};
  std::atomic<uint32_t> sleepers{0};

  /// Sleeps unless rings != seen; at most `limit` (zero: no limit).
  void sleep(uint32_t seen, std::chrono::milliseconds limit);
  void ring();
};

}  // namespace echelon::local
