// Floating-point elements from one dtype to another, where there is no
// LibTorch: IEEE 754's binary64, binary32 and binary16 ("F64", "F32", "F16")
// and "BF16", which is the upper half of a binary32. To the nearest value, of
// two the even one.
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
/// Infinities stay what they are, NaNs stay NaNs. Returns the number of the
/// first finite element that is beyond largest_value(to_dtype), and so has
/// become infinite; `count` when there is none. Throws ConfigError for a dtype
/// that is none of the four.
int64_t convert_floats(
    std::string_view from_dtype, const std::byte* from,
    std::string_view to_dtype, std::byte* to, int64_t count);

}  // namespace echelon
