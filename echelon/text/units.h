// Numbers as people read them, for the progress line and the report.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

namespace echelon {

/// Three significant digits at most: "0.0412", "3.14", "128"; "nan", "inf".
std::string format_number(double value);

/// Thousands with commas: 5120.4 -> "5,120".
std::string format_count(double value);
inline std::string format_count(std::integral auto value) {
  return format_count(static_cast<double>(value));
}

/// "1 step", "5,120 steps", "3 batches", "2 classes".
std::string counted(int64_t number, std::string_view what);

/// For axes: "950", "12.5k", "3M", "1.2e-5".
std::string format_compact(double value);

/// "850 ns", "12.5 µs", "3.2 ms", "1.24 s", "2 min 05 s", "3 h 07 min".
std::string format_seconds(double seconds);

/// A clock: "0:42", "12:05", "3:07:00", "2d 03:15".
std::string format_clock(double seconds);

/// A share of 1: "97.5 %", "8 %", "< 0.1 %".
std::string format_percent(double share);

/// With spaces that do not break before each "%": for prose.
std::string unbroken(std::string text);

/// "512 B", "1.5 MiB".
std::string format_bytes(int64_t bytes);
inline std::string format_bytes(std::floating_point auto bytes) {
  return format_bytes(static_cast<int64_t>(bytes));
}

}  // namespace echelon
