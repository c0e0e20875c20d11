// Numbers 0 to count-1, each worked on by one of some threads.
#pragma once

#include <cstdint>
#include <functional>

namespace echelon {

/// As the machine has processors, at most 4, when `threads` is 0. Throws
/// ConfigError for a negative number.
int num_threads(int threads);

/// Calls work(i) for each i, in about that order, by the caller's thread and
/// threads - 1 others. After a throw no more work is begun, and the error of
/// the smallest such i is thrown when all have ended.
///
///   after  is called by the caller's thread behind each work of its own
void share_work(
    int64_t count, int threads, const std::function<void(int64_t)>& work,
    const std::function<void()>& after = {});

}  // namespace echelon
