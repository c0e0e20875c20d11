// How a thread waits: 64 pauses of the CPU (24 ns each), some yields, then it
// sleeps in the kernel. More pauses are no faster on a free core and ruin a
// crowded one; yields do not. Waking a sleeper takes its peer 10 us and leaves
// the caches cold, so the thread that computes next yields for 1 ms before it
// sleeps. The progress thread yields a few times only.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace echelon::local {

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

}  // namespace echelon::local
