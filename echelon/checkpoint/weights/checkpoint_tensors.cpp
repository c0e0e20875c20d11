#include "echelon/checkpoint/weights/checkpoint_tensors.h"

#include <utility>

#include "echelon/error.h"

namespace echelon {

CheckpointTensors::CheckpointTensors(
    std::unique_ptr<CheckpointReader> reader, std::string way_out)
    : CheckpointTensors(*reader, std::move(way_out)) {
  own_ = std::move(reader);
}

CheckpointTensors::CheckpointTensors(
    CheckpointReader& reader, std::string way_out)
    : reader_(reader), way_out_(std::move(way_out)) {
  for (const auto& tensor : manifest().tensors) {
    if (tensor.kind != SavedKind::parameter &&
        tensor.kind != SavedKind::buffer) {
      continue;
    }
    facts_.push_back({tensor.name, tensor.dtype, tensor.shape});
    saved_.push_back(&tensor);
  }
}

void CheckpointTensors::read(const std::vector<Piece>& pieces) {
  std::vector<BoxRead> reads;
  for (const auto& piece : pieces) {
    add_reads(reads, *saved_.at(piece.tensor), piece.elements, piece.to);
  }
  try {
    reader_.read(reads);
  } catch (const CheckpointError& error) {
    throw CheckpointError(error.what() + way_out_);
  }
}

}  // namespace echelon
