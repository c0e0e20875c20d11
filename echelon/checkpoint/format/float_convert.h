// Conversion of floating-point elements without LibTorch, between IEEE 754's
// binary64, binary32 and binary16 ("F64", "F32", "F16") and "BF16", the upper
// half of a binary32. Rounds to nearest, ties to even.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace echelon {

/// Whether it is one of the four.
bool is_float_dtype(std::string_view dtype);

/// The largest finite value of one of the four.
double largest_value(std::string_view dtype);

/// Converts `count` little-endian elements; the memory must not overlap.
/// Infinities and NaNs stay what they are. Returns the index of the first
/// finite element beyond largest_value(to_dtype), which has become infinite;
/// `count` when there is none. Throws ConfigError for a dtype that is none of
/// the four.
int64_t convert_floats(
    std::string_view from_dtype, const std::byte* from,
    std::string_view to_dtype, std::byte* to, int64_t count);

}  // namespace echelon
