// A file of lines that another process adds to while this one reads.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace echelon::monitoring {

/// The bytes at `begin`: fewer than `size` where the file ends.
std::string read_at(int file, int64_t begin, int64_t size);

/// Calls `take` with the whole lines in [begin, end), many at once, and where
/// they begin; returns where they end. The last line may be half written, and
/// then is left for the next time. A MiB without the end of a line is skipped:
/// no line has so many bytes.
int64_t read_lines(
    int file, int64_t begin, int64_t end,
    const std::function<void(int64_t begin, std::string_view lines)>& take);

}  // namespace echelon::monitoring
