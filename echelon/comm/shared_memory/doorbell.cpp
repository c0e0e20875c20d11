#include "echelon/comm/shared_memory/doorbell.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace echelon::local {

bool idle_step(int& idle) {
  if (idle < kSpins) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  } else if (idle < kSpins + kYields) {
    sched_yield();
  } else {
    return false;
  }
  ++idle;
  return true;
}

// Not FUTEX_PRIVATE: the sleepers may be other processes.
void Doorbell::sleep(uint32_t seen, std::chrono::milliseconds limit) {
  timespec time{};
  time.tv_sec = limit.count() / 1000;
  time.tv_nsec = (limit.count() % 1000) * 1000000;
  syscall(
      SYS_futex, reinterpret_cast<uint32_t*>(&rings), FUTEX_WAIT, seen,
      limit.count() > 0 ? &time : nullptr, nullptr, 0);
}

void Doorbell::ring() {
  rings.fetch_add(1, std::memory_order_seq_cst);
  syscall(
      SYS_futex, reinterpret_cast<uint32_t*>(&rings), FUTEX_WAKE, INT_MAX,
      nullptr, nullptr, 0);
}

}  // namespace echelon::local
