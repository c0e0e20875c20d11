// Bytes of token files and of their indices for tests.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace echelon {

template <typename T>
std::string raw_bytes(const std::vector<T>& values) {
  return {
      reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

/// An .idx, field by field; one pointer for each size.
inline std::string make_index(
    int type, const std::vector<int32_t>& sizes,
    const std::vector<int64_t>& pointers,
    const std::vector<int64_t>& documents) {
  std::string index("MMIDIDX\0\0", 9);
  index += raw_bytes<uint64_t>({1});
  index += static_cast<char>(type);
  index += raw_bytes<uint64_t>({sizes.size(), documents.size()});
  index += raw_bytes(sizes);
  index += raw_bytes(pointers);
  index += raw_bytes(documents);
  return index;
}

}  // namespace echelon
