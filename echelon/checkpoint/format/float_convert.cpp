// Every conversion passes through doubles, which represent all values of the
// other dtypes, so each value is rounded once. F32 to BF16, the usual
// conversion of an export, has a loop of its own that compiles to vector
// instructions.
#include "echelon/checkpoint/format/float_convert.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "echelon/error.h"

namespace echelon {
namespace {

/// 1 bit of sign, then `exponent` bits, then `fraction` bits.
struct Format {
  int exponent;
  int fraction;
};
constexpr Format kF16 = {5, 10};
constexpr Format kBf16 = {8, 7};

// A double's fraction and the bias of its exponent.
constexpr int kFraction = 52;
constexpr int kBias = 1023;

template <Format kFormat>
uint16_t rounded(double value) {
  constexpr int kOurBias = (1 << (kFormat.exponent - 1)) - 1;
  constexpr uint16_t kInfinity = ((1 << kFormat.exponent) - 1)
                                 << kFormat.fraction;
  const auto bits = std::bit_cast<uint64_t>(value);
  const auto sign = static_cast<uint16_t>(bits >> 63 << 15);
  const uint64_t fraction = bits & ((uint64_t{1} << kFraction) - 1);
  const int exponent = static_cast<int>(bits >> kFraction & 0x7ff) - kBias;
  if (exponent == kBias + 1 && fraction != 0) {
    // A quiet NaN with the upper bits of what it carries.
    const auto carried = fraction >> (kFraction - kFormat.fraction);
    return static_cast<uint16_t>(
        sign | kInfinity | 1 << (kFormat.fraction - 1) | carried);
  }
  if (exponent > kOurBias) return sign | kInfinity;
  // Below the smallest normal value more bits are dropped.
  const bool normal = exponent >= 1 - kOurBias;
  const int dropped =
      kFraction - kFormat.fraction + (normal ? 0 : 1 - kOurBias - exponent);
  if (dropped > kFraction + 1) return sign;
  const uint64_t significand = fraction | uint64_t{1} << kFraction;
  const uint64_t rest = significand & ((uint64_t{1} << dropped) - 1);
  const uint64_t half = uint64_t{1} << (dropped - 1);
  uint64_t kept = significand >> dropped;
  if (rest > half || (rest == half && (kept & 1) != 0)) ++kept;
  // The leading 1 of a normal value adds 1 to the exponent, as does the carry
  // of rounding.
  if (normal) {
    kept += static_cast<uint64_t>(exponent + kOurBias - 1) << kFormat.fraction;
  }
  return static_cast<uint16_t>(sign | std::min<uint64_t>(kept, kInfinity));
}

double from_bf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

double from_f16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t exponent = bits >> kF16.fraction & 0x1f;
  const uint32_t fraction = bits & 0x3ff;
  if (exponent == 0) {
    return std::copysign(fraction * 0x1p-24, sign == 0 ? 1.0 : -1.0);
  }
  const uint32_t wide = exponent == 0x1f ? 0xff : exponent + 127 - 15;
  return std::bit_cast<float>(sign | wide << 23 | fraction << 13);
}

template <class Stored, class Value>
Value load(const std::byte* from) {
  Stored stored;
  std::memcpy(&stored, from, sizeof stored);
  return static_cast<Value>(stored);
}

enum class Kind { f64, f32, f16, bf16 };

Kind kind_of(std::string_view dtype) {
  if (dtype == "F64") return Kind::f64;
  if (dtype == "F32") return Kind::f32;
  if (dtype == "F16") return Kind::f16;
  if (dtype == "BF16") return Kind::bf16;
  throw ConfigError(
      "dtype " + std::string(dtype) +
      " is no floating-point one that is converted; known are F64, F32, F16 "
      "and BF16");
}

double read_one(Kind kind, const std::byte* from) {
  switch (kind) {
    case Kind::f64:
      return load<double, double>(from);
    case Kind::f32:
      return load<float, double>(from);
    case Kind::f16:
      return from_f16(load<uint16_t, uint16_t>(from));
    case Kind::bf16:
      return from_bf16(load<uint16_t, uint16_t>(from));
  }
  return 0;
}

template <Kind kKind>
auto converted(double value) {
  if constexpr (kKind == Kind::f64) return value;
  if constexpr (kKind == Kind::f32) return static_cast<float>(value);
  if constexpr (kKind == Kind::f16) return rounded<kF16>(value);
  if constexpr (kKind == Kind::bf16) return rounded<kBf16>(value);
}

template <Kind kFrom, Kind kTo>
void convert(const std::byte* from, std::byte* to, int64_t count) {
  constexpr auto kWidth = [](Kind kind) -> int64_t {
    return kind == Kind::f64 ? 8 : kind == Kind::f32 ? 4 : 2;
  };
  for (int64_t i = 0; i < count; ++i) {
    const auto value =
        converted<kTo>(read_one(kFrom, from + i * kWidth(kFrom)));
    std::memcpy(to + i * kWidth(kTo), &value, sizeof value);
  }
}

template <>
void convert<Kind::f32, Kind::bf16>(
    const std::byte* from, std::byte* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + 4 * i, 4);
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    const uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const auto value = static_cast<uint16_t>(nan ? bits >> 16 | 0x40 : nearest);
    std::memcpy(to + 2 * i, &value, 2);
  }
}

using Convert = void (*)(const std::byte*, std::byte*, int64_t);

template <Kind kFrom>
constexpr std::array<Convert, 4> kConvertFrom = {
    convert<kFrom, Kind::f64>, convert<kFrom, Kind::f32>,
    convert<kFrom, Kind::f16>, convert<kFrom, Kind::bf16>};

constexpr std::array<std::array<Convert, 4>, 4> kConvert = {
    kConvertFrom<Kind::f64>, kConvertFrom<Kind::f32>, kConvertFrom<Kind::f16>,
    kConvertFrom<Kind::bf16>};

constexpr std::array<int64_t, 4> kBytes = {8, 4, 2, 2};

}  // namespace

bool is_float_dtype(std::string_view dtype) {
  return dtype == "F64" || dtype == "F32" || dtype == "F16" || dtype == "BF16";
}

double largest_value(std::string_view dtype) {
  switch (kind_of(dtype)) {
    case Kind::f64:
      return std::numeric_limits<double>::max();
    case Kind::f32:
      return std::numeric_limits<float>::max();
    case Kind::f16:
      return 65504;
    case Kind::bf16:
      return from_bf16(0x7f7f);
  }
  return 0;
}

int64_t convert_floats(
    std::string_view from_dtype, const std::byte* from,
    std::string_view to_dtype, std::byte* to, int64_t count) {
  const Kind from_kind = kind_of(from_dtype);
  const Kind to_kind = kind_of(to_dtype);
  const auto a = static_cast<size_t>(from_kind);
  const auto b = static_cast<size_t>(to_kind);
  kConvert[a][b](from, to, count);
  if (largest_value(from_dtype) <= largest_value(to_dtype)) return count;
  for (int64_t i = 0; i < count; ++i) {
    if (std::isinf(read_one(to_kind, to + i * kBytes[b])) &&
        !std::isinf(read_one(from_kind, from + i * kBytes[a]))) {
      return i;
    }
  }
  return count;
}

}  // namespace echelon
