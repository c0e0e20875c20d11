// Elements of tensors as numbers, where there is no LibTorch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace echelon {

/// Whether read_floats() knows the dtype.
bool is_float(std::string_view dtype);

/// The `count` little-endian elements at `bytes`, exactly. False, with nothing
/// written, unless is_float(dtype).
bool read_floats(
    std::string_view dtype,
    const std::byte* bytes,
    size_t count,
    double* values);

}  // namespace echelon
