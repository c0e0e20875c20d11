// Shared by the readers and writers of safetensors files. Private to the
// folders of checkpoint/.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "echelon/checkpoint/format/safetensors.h"

namespace echelon::safetensors {

/// Bytes of a tensor; none for a negative dimension or when the product of the
/// dimensions (a 0 counted as 1) overflows 63 bits.
std::optional<uint64_t>
tensor_bytes(std::span<const int64_t> shape, uint64_t width);

/// For messages: control characters are escaped, and the text is truncated
/// after 120 bytes.
std::string printable(std::string_view text);
std::string quote_printable(std::string_view text);
std::string known_dtypes();

/// The file that write() makes of `tensors`: the bytes of `head`, then those of
/// the tensors in `order`. Borrows them. Throws ConfigError.
struct FilePlan {
  std::string head;
  std::vector<const TensorBytes*> order;
  uint64_t bytes = 0;  // of the file
};
FilePlan plan_file(
    const std::string& path, const std::vector<TensorBytes>& tensors,
    const Metadata& metadata);

}  // namespace echelon::safetensors
