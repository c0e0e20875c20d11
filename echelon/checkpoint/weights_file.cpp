#include "echelon/checkpoint/weights_file.h"

#include <algorithm>
#include <cstddef>
#include <map>

#include "echelon/checkpoint/new_file.h"
#include "echelon/checkpoint/safetensors_text.h"
#include "echelon/error.h"

namespace echelon {
namespace {

std::vector<const SavedTensor*>
chosen(const CheckpointReader& reader, const std::vector<std::string>& names) {
  std::vector<const SavedTensor*> tensors;
  for (const auto& name : names) {
    const SavedTensor* tensor = reader.manifest().find(name);
    if (tensor == nullptr) {
      throw CheckpointError(
          reader.folder() + ": has no tensor \"" + name +
          "\"; `echelon checkpoint show` lists those that it has");
    }
    tensors.push_back(tensor);
  }
  if (!names.empty()) return tensors;
  for (const auto& tensor : reader.manifest().tensors) {
    if (tensor.kind == SavedKind::parameter ||
        tensor.kind == SavedKind::buffer) {
      tensors.push_back(&tensor);
    }
  }
  return tensors;
}

// Boxes in the order of the file, until there are about so many bytes of them.
class Batches {
 public:
  Batches(CheckpointReader& reader, NewFile& file, int64_t bytes)
      : reader_(reader), file_(file), most_(std::max<int64_t>(1, bytes)) {}

  void add(const SavedTensor& tensor) {
    const Box all = whole_box(tensor.shape);
    const auto width =
        static_cast<int64_t>(safetensors::dtype_bytes(tensor.dtype));
    const int64_t numel = all.numel();
    const int64_t step = std::max<int64_t>(1, most_ / width);
    for (int64_t begin = 0; begin < numel; begin += step) {
      const int64_t end = std::min(numel, begin + step);
      for (const auto& box : boxes_of(all, {begin, end})) {
        places_.push_back(bytes_);
        bytes_ += box.numel() * width;
        reads_.push_back({.tensor = &tensor, .box = box});
      }
      if (bytes_ >= most_) flush();
    }
  }

  void flush() {
    memory_.resize(static_cast<size_t>(bytes_));
    for (size_t i = 0; i < reads_.size(); ++i) {
      reads_[i].to = memory_.data() + places_[i];
    }
    reader_.read(reads_);
    file_.append(memory_.data(), memory_.size());
    reads_.clear();
    places_.clear();
    bytes_ = 0;
  }

 private:
  CheckpointReader& reader_;
  NewFile& file_;
  int64_t most_;
  std::vector<BoxRead> reads_;
  std::vector<int64_t> places_;  // in memory_
  int64_t bytes_ = 0;
  std::vector<std::byte> memory_;
};

}  // namespace

void write_weights(
    CheckpointReader& reader,
    const std::string& path,
    const std::vector<std::string>& names,
    int64_t memory_bytes) {
  // The file is planned by sizes alone; nobody looks at these bytes.
  static constexpr std::byte kNowhere{};
  std::vector<safetensors::TensorBytes> list;
  std::map<std::string, const SavedTensor*> by_name;
  for (const SavedTensor* tensor : chosen(reader, names)) {
    const auto bytes = static_cast<size_t>(whole_box(tensor->shape).numel()) *
                       safetensors::dtype_bytes(tensor->dtype);
    list.push_back(
        {tensor->name, tensor->dtype, tensor->shape, {&kNowhere, bytes}});
    by_name[tensor->name] = tensor;
  }
  const auto plan = safetensors::plan_file(path, list, {{"format", "pt"}});
  NewFile file(path, plan.bytes, NewFile::Under::beside);
  file.append(plan.head.data(), plan.head.size());
  Batches batches(reader, file, memory_bytes);
  for (const auto* tensor : plan.order) batches.add(*by_name.at(tensor->name));
  batches.flush();
  file.move_into_place();
}

}  // namespace echelon
