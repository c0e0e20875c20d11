// Sizes in bytes as people write them: "48GiB", "512 MiB", "2GB", 65536.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace echelon::config {

/// The bytes that "48GiB", "1.5 MiB", "2 GB" or "65536" stands for, rounded to
/// a whole number. Empty when the text is none of these, or at 2^63 and beyond.
std::optional<int64_t> parse_bytes(std::string_view text);

/// The shortest exact text: "25 MiB", "5 GB", or digits alone below 1,000 and
/// where no unit is exact. parse_bytes() gives back the same number.
std::string bytes_text(int64_t bytes);

}  // namespace echelon::config
