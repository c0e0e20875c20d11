// Divides work between threads.
#pragma once

#include <cstdint>
#include <functional>

namespace echelon {

/// `threads`, or when it is 0 the machine's processors, at most 4. Throws
/// ConfigError for a negative number.
int num_threads(int threads);

/// Calls work(i) for each i below `count`, in about that order, by the caller's
/// thread and threads - 1 others. After an error no more work is started, and
/// the error of the smallest i is thrown when all threads have ended.
///
///   after  called by the caller's thread after each work of its own
void share_work(
    int64_t count, int threads, const std::function<void(int64_t)>& work,
    const std::function<void()>& after = {});

}  // namespace echelon
