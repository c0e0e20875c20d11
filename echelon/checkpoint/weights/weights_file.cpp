#include "echelon/checkpoint/weights/weights_file.h"

#include <map>

#include "echelon/checkpoint/weights/checkpoint_tensors.h"
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

void write_weights(
    CheckpointReader& reader, const std::string& path,
    const std::vector<std::string>& names, int64_t memory_bytes) {
  CheckpointTensors source(reader);
  write_tensors(
      path, source, chosen(source, names), {{"format", "pt"}}, memory_bytes);
}

}  // namespace echelon
