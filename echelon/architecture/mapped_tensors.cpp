#include "echelon/architecture/mapped_tensors.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace echelon {
namespace {

// The bytes of a mapped file that are in memory at a time.
constexpr size_t kMappedBytes = 8 << 20;

}  // namespace

MappedTensors::MappedTensors(WeightsSource weights)
    : weights_(std::move(weights)) {
  for (const auto& [name, tensor] : weights_.tensors()) {
    facts_.push_back(tensor.facts);
    mapped_.push_back(&tensor);
  }
}

void MappedTensors::read(const std::vector<Piece>& pieces) {
  for (const auto& piece : pieces) {
    const auto& tensor = *mapped_.at(piece.tensor);
    if (!tensor.file) {
      tensor.read(piece.elements, piece.to);
      continue;
    }
    const auto width = safetensors::dtype_bytes(tensor.info->dtype);
    const auto bytes =
        tensor.file->bytes(*tensor.info)
            .subspan(
                static_cast<size_t>(piece.elements.begin) * width,
                static_cast<size_t>(piece.elements.size()) * width);
    for (size_t at = 0; at < bytes.size(); at += kMappedBytes) {
      const auto some =
          bytes.subspan(at, std::min(kMappedBytes, bytes.size() - at));
      std::memcpy(piece.to + at, some.data(), some.size());
      tensor.file->forget(some);
    }
  }
}

}  // namespace echelon
