#include "echelon/models/mapped_tensors.h"

#include <cstring>
#include <utility>

namespace echelon {

MappedTensors::MappedTensors(WeightsSource weights)
    : weights_(std::move(weights)) {
  for (const auto& [name, tensor] : weights_.tensors()) {
    facts_.push_back({name, tensor.info->dtype, tensor.info->shape});
    mapped_.push_back(&tensor);
  }
}

void MappedTensors::read(const std::vector<Piece>& pieces) {
  for (const auto& piece : pieces) {
    const auto& tensor = *mapped_.at(piece.tensor);
    const auto width = safetensors::dtype_bytes(tensor.info->dtype);
    const auto bytes = tensor.file->bytes(*tensor.info).subspan(
        static_cast<size_t>(piece.elements.begin) * width,
        static_cast<size_t>(piece.elements.size()) * width);
    if (bytes.empty()) continue;
    std::memcpy(piece.to, bytes.data(), bytes.size());
    tensor.file->forget(bytes);
  }
}

}  // namespace echelon
