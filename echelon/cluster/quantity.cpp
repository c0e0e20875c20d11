#include "echelon/cluster/quantity.h"

#include <charconv>
#include <cmath>
#include <vector>

namespace echelon::cluster {
namespace {

struct Spelling {
  std::string_view word;
  // The value is the number times `factor` over `divisor`: both are whole
  // powers, so that "5 us" is the double nearest to 5e-6.
  double factor;
  double divisor = 1;
  bool written = true;  // quantity_text may choose it
};

constexpr double kKi = 1024.0, kMi = kKi * kKi, kGi = kMi * kKi,
                 kTi = kGi * kKi;

const std::vector<Spelling>& spellings(Unit unit) {
  static const std::vector<Spelling> bytes = {
      {"B", 1},
      {"KB", 1e3, 1, false},
      {"kB", 1e3, 1, false},
      {"MB", 1e6, 1, false},
      {"GB", 1e9},
      {"TB", 1e12, 1, false},
      {"KiB", kKi},
      {"MiB", kMi},
      {"GiB", kGi},
      {"TiB", kTi}};
  static const std::vector<Spelling> rates = {
      {"B/s", 1},
      {"KB/s", 1e3},
      {"kB/s", 1e3, 1, false},
      {"MB/s", 1e6},
      {"GB/s", 1e9},
      {"TB/s", 1e12},
      {"KiB/s", kKi, 1, false},
      {"MiB/s", kMi, 1, false},
      {"GiB/s", kGi, 1, false},
      {"TiB/s", kTi, 1, false},
      {"bit/s", 1, 8, false},
      {"kbit/s", 1e3, 8, false},
      {"Mbit/s", 1e6, 8, false},
      {"Gbit/s", 1e9, 8, false},
      {"Tbit/s", 1e12, 8, false}};
  static const std::vector<Spelling> seconds = {
      {"ns", 1, 1e9},
      {"us", 1, 1e6},
      {"µs", 1, 1e6, false},
      {"ms", 1, 1e3},
      {"s", 1}};
  static const std::vector<Spelling> flops = {
      {"FLOP/s", 1},
      {"MFLOP/s", 1e6},
      {"GFLOP/s", 1e9},
      {"TFLOP/s", 1e12},
      {"PFLOP/s", 1e15, 1, false}};
  switch (unit) {
    case Unit::bytes:
      return bytes;
    case Unit::bytes_per_second:
      return rates;
    case Unit::seconds:
      return seconds;
    case Unit::flops_per_second:
      break;
  }
  return flops;
}

std::string shortest(double value) {
  char text[400];  // "fixed" writes up to 309 digits
  const auto end =
      std::to_chars(text, text + sizeof(text), value, std::chars_format::fixed)
          .ptr;
  return {text, end};
}

}  // namespace

std::optional<double> parse_quantity(std::string_view text, Unit unit) {
  double number = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || !std::isfinite(number)) return std::nullopt;
  std::string_view word(rest, static_cast<size_t>(end - rest));
  while (!word.empty() && word.front() == ' ') word.remove_prefix(1);
  while (!word.empty() && word.back() == ' ') word.remove_suffix(1);
  for (const auto& spelling : spellings(unit)) {
    if (word != spelling.word) continue;
    const double value = number * spelling.factor / spelling.divisor;
    if (!std::isfinite(value)) return std::nullopt;
    return value;
  }
  return std::nullopt;
}

std::string quantity_text(double value, Unit unit) {
  std::string best;
  for (const auto& spelling : spellings(unit)) {
    if (!spelling.written) continue;
    const double number = value * spelling.divisor / spelling.factor;
    if (!std::isfinite(number)) continue;
    const std::string text =
        shortest(number) + " " + std::string(spelling.word);
    if (parse_quantity(text, unit) != value) continue;
    // The shortest; of equal ones the larger unit, 1 GiB and not 1024 MiB.
    if (best.empty() || text.size() <= best.size()) best = text;
  }
  if (!best.empty()) return best;
  for (const auto& spelling : spellings(unit)) {
    if (spelling.factor == 1 && spelling.divisor == 1) {
      return shortest(value) + " " + std::string(spelling.word);
    }
  }
  return shortest(value);
}

std::string_view quantity_example(Unit unit) {
  switch (unit) {
    case Unit::bytes:
      return "80 GiB";
    case Unit::bytes_per_second:
      return "400 Gbit/s or 50 GB/s";
    case Unit::seconds:
      return "5 us";
    case Unit::flops_per_second:
      break;
  }
  return "312 TFLOP/s";
}

}  // namespace echelon::cluster
