#include "echelon/config/byte_size.h"

#include <charconv>
#include <cmath>

#include "echelon/text/format.h"

namespace echelon::config {
namespace {

struct ByteUnit {
  std::string_view name;
  int64_t bytes;
};

constexpr ByteUnit kByteUnits[] = {
    {"TiB", int64_t{1} << 40},
    {"GiB", int64_t{1} << 30},
    {"MiB", int64_t{1} << 20},
    {"KiB", int64_t{1} << 10},
    {"TB", 1'000'000'000'000},
    {"GB", 1'000'000'000},
    {"MB", 1'000'000},
    {"kB", 1'000},
    {"KB", 1'000},
    {"B", 1},
    {"", 1}};

}  // namespace

std::optional<int64_t> parse_bytes(std::string_view text) {
  const char* end = text.data() + text.size();
  double number = 0;
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc()) return std::nullopt;
  std::string_view name(rest, static_cast<size_t>(end - rest));
  while (name.starts_with(' ')) name.remove_prefix(1);
  for (const ByteUnit& unit : kByteUnits) {
    if (name != unit.name) continue;
    int64_t whole = 0;
    const auto digits = std::from_chars(text.data(), end, whole);
    // Whole numbers are exact, also beyond 2^53.
    if (digits.ec == std::errc() && digits.ptr == rest) {
      int64_t bytes = 0;
      if (__builtin_mul_overflow(whole, unit.bytes, &bytes)) return {};
      return bytes;
    }
    const double bytes = number * static_cast<double>(unit.bytes);
    if (!(std::abs(bytes) < 9.2e18)) return std::nullopt;
    return std::llround(bytes);
  }
  return std::nullopt;
}

std::string bytes_text(int64_t bytes) {
  std::string best = std::to_string(bytes);
  if (bytes < 1000) return best;
  size_t best_digits = best.size();
  for (const ByteUnit& unit : kByteUnits) {
    if (unit.bytes == 1 || bytes % unit.bytes != 0) continue;
    const std::string digits = std::to_string(bytes / unit.bytes);
    if (digits.size() >= best_digits) continue;
    best_digits = digits.size();
    best = format("{} {}", digits, unit.name);
  }
  return best;
}

}  // namespace echelon::config
