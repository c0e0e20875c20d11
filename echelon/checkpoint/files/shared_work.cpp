#include "echelon/checkpoint/files/shared_work.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {

int num_threads(int threads) {
  if (threads < 0) {
    throw ConfigError(format(
        "threads = {}; it must be 0 (as the machine has processors) or more",
        threads));
  }
  if (threads > 0) return threads;
  return static_cast<int>(
      std::clamp(std::thread::hardware_concurrency(), 1u, 4u));
}

void share_work(
    int64_t count, int threads, const std::function<void(int64_t)>& work,
    const std::function<void()>& after) {
  std::atomic<int64_t> next = 0;
  std::atomic<bool> failed = false;
  std::mutex mutex;
  int64_t first = count;
  std::exception_ptr error;
  const auto run = [&](bool caller) {
    while (!failed) {
      const int64_t i = next++;
      if (i >= count) return;
      try {
        work(i);
        if (caller && after) after();
      } catch (...) {
        const std::lock_guard lock(mutex);
        failed = true;
        if (i >= first) continue;
        first = i;
        error = std::current_exception();
      }
    }
  };
  std::vector<std::jthread> others;
  for (int64_t i = 1; i < std::min<int64_t>(threads, count); ++i) {
    others.emplace_back(run, false);
  }
  run(true);
  others.clear();
  if (error) std::rethrow_exception(error);
}

}  // namespace echelon
