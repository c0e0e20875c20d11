// A hash of a tensor's contents that does not depend on how it is cut: sums, over
// its elements, of numbers that depend on an element's index and bits. Ranks hash
// what they have and add up. Not cryptographic. Free of LibTorch.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "echelon/checkpoint/box.h"

namespace echelon {

using ContentHash = std::array<uint64_t, 2>;

/// Of the elements of `box`, whose row-major bytes are given (1, 2, 4 or 8 an
/// element), of a tensor of `shape`.
ContentHash hash_elements(
    const std::vector<int64_t>& shape,
    const Box& box,
    const std::byte* bytes,
    size_t element_bytes);

ContentHash operator+(const ContentHash& a, const ContentHash& b);

}  // namespace echelon
