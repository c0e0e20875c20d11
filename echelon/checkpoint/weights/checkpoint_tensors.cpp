#include "echelon/checkpoint/weights/checkpoint_tensors.h"

#include <map>
#include <utility>

#include "echelon/error.h"

namespace echelon {
namespace {

std::vector<TensorToWrite>
chosen(const TensorSource& source, const std::vector<std::string>& names) {
  std::vector<TensorToWrite> all;
  std::map<std::string, size_t> numbers;
  for (const auto& tensor : source.tensors()) {
    numbers[tensor.name] = all.size();
    all.push_back({all.size(), tensor.name, tensor.dtype});
  }
  if (names.empty()) return all;
  std::vector<TensorToWrite> tensors;
  for (const auto& name : names) {
    const auto found = numbers.find(name);
    if (found == numbers.end()) {
      throw CheckpointError(
          source.path() + ": has no parameter or buffer \"" + name +
          "\"; `echelon checkpoint show` lists those that it has");
    }
    tensors.push_back(all[found->second]);
  }
  return tensors;
}

}  // namespace

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

void write_weights(
    CheckpointReader& reader, const std::string& path,
    const std::vector<std::string>& names, int64_t memory_bytes) {
  CheckpointTensors source(reader);
  write_tensors(
      path, source, chosen(source, names), {{"format", "pt"}}, memory_bytes);
}

}  // namespace echelon
