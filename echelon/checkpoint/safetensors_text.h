// What the reader and the writer of safetensors files share. Not for others.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace echelon::safetensors {

/// Bytes of a tensor; nothing for a negative dimension or when the product of
/// the dimensions (a 0 counted as 1) overflows 63 bits.
std::optional<uint64_t>
tensor_bytes(std::span<const int64_t> shape, uint64_t width);

/// For messages: control characters escaped, cut after 120 bytes.
std::string printable(std::string_view text);
std::string in_quotes(std::string_view text);
std::string known_dtypes();

}  // namespace echelon::safetensors
