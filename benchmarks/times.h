// How long repeated work took.
#pragma once

#include <algorithm>
#include <chrono>
#include <ctime>
#include <functional>
#include <vector>

namespace echelon {

/// Of several runs of the same work. Other programs disturb the processors'
/// time of this process less.
struct Times {
  std::vector<double> seconds;
  std::vector<double> processor_seconds;

  void take(const std::function<void()>& work) {
    const auto start = std::chrono::steady_clock::now();
    const double used = processor_time();
    work();
    processor_seconds.push_back(processor_time() - used);
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
            .count());
  }
  static double processor_time() {
    struct timespec time = {};
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) +
           static_cast<double>(time.tv_nsec) * 1e-9;
  }
  static double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  }
};

}  // namespace echelon
