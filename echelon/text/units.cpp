#include "echelon/text/units.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "echelon/text/format.h"

namespace echelon {
namespace {

std::string not_finite(double value) {
  if (std::isnan(value)) return "nan";
  return value > 0 ? "inf" : "-inf";
}

// "1.23e-5", "2e299".
std::string scientific(double value) {
  const std::string text = format("{:.2e}", value);
  std::string digits = text.substr(0, text.find('e'));
  digits.erase(digits.find_last_not_of('0') + 1);
  if (digits.back() == '.') digits.pop_back();
  return digits + "e" +
         std::to_string(std::stoi(text.substr(text.find('e') + 1)));
}

}  // namespace

std::string format_number(double value) {
  if (!std::isfinite(value)) return not_finite(value);
  const double size = std::abs(value);
  if (size == 0) return "0";
  if (size >= 99999.5 || size < 0.00095) return scientific(value);
  if (size >= 99.95) return format_count(value);
  int digits = 2 - static_cast<int>(std::floor(std::log10(size)));
  std::string text = format("{:.{}f}", value, std::min(digits, 6));
  while (text.find('.') != std::string::npos && text.back() == '0') {
    text.pop_back();
  }
  if (text.back() == '.') text.pop_back();
  return text;
}

std::string format_count(double value) {
  if (!std::isfinite(value)) return not_finite(value);
  if (std::abs(value) >= 1e15) return format("{:.3g}", value);
  std::string digits = format("{:.0f}", std::abs(value));
  for (int i = static_cast<int>(digits.size()) - 3; i > 0; i -= 3) {
    digits.insert(i, ",");
  }
  return (value <= -0.5 ? "-" : "") + digits;
}

std::string counted(int64_t number, std::string_view what) {
  const bool longer = what.ends_with("ch") || what.ends_with('s');
  const char* plural = number == 1 ? "" : longer ? "es" : "s";
  return format("{} {}{}", format_count(number), what, plural);
}

std::string format_compact(double value) {
  const double size = std::abs(value);
  if (!std::isfinite(value) || size < 9999.5) return format_number(value);
  constexpr std::array<const char*, 4> kUnits = {"k", "M", "G", "T"};
  double scaled = value / 1e3;
  size_t unit = 0;
  while (std::abs(scaled) >= 999.5 && unit + 1 < kUnits.size()) {
    scaled /= 1e3;
    ++unit;
  }
  return format_number(scaled) + kUnits[unit];
}

std::string format_seconds(double seconds) {
  if (!std::isfinite(seconds)) return not_finite(seconds);
  if (seconds < 0) return "-" + format_seconds(-seconds);
  if (seconds == 0) return "0 s";
  if (seconds < 0.9995e-6) return format("{:.0f} ns", seconds * 1e9);
  if (seconds < 0.9995e-3) return format_number(seconds * 1e6) + " \u00b5s";
  if (seconds < 0.9995) return format_number(seconds * 1e3) + " ms";
  if (seconds < 119.5 || seconds > 1e12) return format_number(seconds) + " s";
  const auto whole = std::llround(seconds);
  if (whole < 7200) return format("{} min {:02} s", whole / 60, whole % 60);
  const auto minutes = std::llround(seconds / 60);
  return format("{} h {:02} min", minutes / 60, minutes % 60);
}

std::string format_clock(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0 || seconds > 1e9) return "-:--";
  const auto s = std::llround(seconds);
  if (s < 3600) return format("{}:{:02}", s / 60, s % 60);
  if (s < 86400) {
    return format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
  }
  return format("{}d {:02}:{:02}", s / 86400, s / 3600 % 24, s / 60 % 60);
}

std::string format_percent(double share) {
  if (!std::isfinite(share)) return not_finite(share);
  const double percent = 100 * share;
  if (percent == 0) return "0 %";
  if (std::abs(percent) < 0.1) return "< 0.1 %";
  // 99.96 % correct is not all correct.
  if (percent < 100 && percent > 99.9) return "> 99.9 %";
  const bool tenths = std::abs(percent) < 9.95 || std::abs(percent) >= 90;
  std::string text = format("{:.{}f}", percent, tenths ? 1 : 0);
  if (tenths && text.ends_with(".0")) text.resize(text.size() - 2);
  return text + " %";
}

std::string unbroken(std::string text) {
  for (size_t at = 0; (at = text.find(" %", at)) != std::string::npos;) {
    text.replace(at, 1, "\u00a0");
  }
  return text;
}

std::string format_bytes(int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {
      "KiB", "MiB", "GiB", "TiB", "PiB"};
  if (bytes < 1024) return format_count(static_cast<double>(bytes)) + " B";
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  while (value >= 1023.5 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return format_number(value) + " " + kUnits[unit];
}

}  // namespace echelon
