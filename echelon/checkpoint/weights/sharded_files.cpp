// A tensor is as large as its parts reach. So the parts must cover all of it
// without a gap, which tells that a rank's file is missing.
#include "echelon/checkpoint/weights/sharded_files.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "echelon/checkpoint/format/safetensors_text.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using safetensors::quote_printable;
using safetensors::shape_string;

constexpr const char* kKey = "DCP_SHARDING_INFO";
// Sums of offsets and sizes below this do not overflow.
constexpr int64_t kMost = int64_t{1} << 48;

std::vector<std::string> sharded_files(const std::string& folder) {
  std::vector<std::string> paths;
  std::error_code error;
  fs::directory_iterator at(folder, error);
  for (; !error && at != fs::directory_iterator(); at.increment(error)) {
    const auto name = at->path().filename().string();
    if (name.starts_with("shard-") && name.ends_with(".safetensors")) {
      paths.push_back(at->path().string());
    }
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

json sharding_info(const safetensors::File& file) {
  const auto found = file.metadata().find(kKey);
  json info = found == file.metadata().end()
                  ? json()
                  : json::parse(found->second, nullptr, false);
  if (info.is_object()) return info;
  throw CheckpointError(
      file.path() + ": its metadata has no object " + kKey +
      ", which says where the parts of tensors belong; save it with "
      "torch.distributed.checkpoint's HuggingFaceStorageWriter");
}

Box box_of(
    const safetensors::File& file, const safetensors::TensorInfo& tensor,
    const json& info) {
  Box box{{}, tensor.shape};
  const json* offsets = nullptr;
  if (const auto entry = info.find(tensor.name);
      entry != info.end() && entry->is_object()) {
    const auto found = entry->find("saved_offsets");
    if (found != entry->end() && found->is_array()) offsets = &*found;
  }
  bool fits = offsets != nullptr && offsets->size() == tensor.shape.size();
  for (size_t d = 0; fits && d < tensor.shape.size(); ++d) {
    const json& offset = (*offsets)[d];
    fits = offset.is_number_unsigned() && offset.get<uint64_t>() < kMost &&
           tensor.shape[d] < kMost;
    if (fits) box.offset.push_back(offset.get<int64_t>());
  }
  if (fits) return box;
  throw CheckpointError(format(
      "{}: tensor {}: {} has no saved_offsets of {} whole numbers for its "
      "shape {}",
      file.path(), quote_printable(tensor.name), kKey, tensor.shape.size(),
      shape_string(tensor.shape)));
}

}  // namespace

bool has_sharded_files(const std::string& folder) {
  return !sharded_files(folder).empty();
}

ShardedFiles::ShardedFiles(
    const std::string& folder,
    const std::function<std::string(const std::string&)>& rename)
    : folder_(folder) {
  std::map<std::string, std::vector<Part>> parts;
  for (const auto& path : sharded_files(folder)) {
    const auto file = std::make_shared<const safetensors::File>(path);
    const json info = sharding_info(*file);
    for (const auto& tensor : file->tensors()) {
      const auto name = rename(tensor.name);
      if (name.empty()) continue;
      parts[name].push_back({box_of(*file, tensor, info), file, &tensor});
    }
  }
  for (auto& [name, list] : parts) {
    const auto fail = [&](const std::string& what) {
      throw CheckpointError(
          format("{}: tensor {}: {}", folder, quote_printable(name), what));
    };
    const auto& first = list.front();
    TensorFacts facts{
        name, first.info->dtype,
        std::vector<int64_t>(first.box.sizes.size(), 0)};
    std::vector<Box> boxes;
    for (const auto& part : list) {
      if (part.info->dtype != facts.dtype ||
          part.box.sizes.size() != facts.shape.size()) {
        fail(format(
            "a part in {} is {} {}, one in {} {} {}", part.file->path(),
            part.info->dtype, shape_string(part.box.sizes), first.file->path(),
            facts.dtype, shape_string(first.box.sizes)));
      }
      for (size_t d = 0; d < facts.shape.size(); ++d) {
        facts.shape[d] =
            std::max(facts.shape[d], part.box.offset[d] + part.box.sizes[d]);
      }
      boxes.push_back(part.box);
    }
    if (!safetensors::tensor_bytes(
            facts.shape, safetensors::dtype_bytes(facts.dtype))) {
      fail("its parts reach to " + shape_string(facts.shape) + ", too much");
    }
    const auto gap = find_gap(facts.shape, boxes);
    if (!gap.empty()) {
      fail(
          gap + ", of " + shape_string(facts.shape) +
          "; all ranks' files must be there, of one save");
    }
    facts_.push_back(std::move(facts));
    parts_.push_back(std::move(list));
  }
}

void ShardedFiles::read(const std::vector<Piece>& pieces) {
  for (const auto& piece : pieces) {
    const auto& facts = facts_.at(piece.tensor);
    const auto width = safetensors::dtype_bytes(facts.dtype);
    std::byte* to = piece.to;
    for (const auto& box : boxes_of(whole_box(facts.shape), piece.elements)) {
      read(piece.tensor, box, to);
      to += static_cast<size_t>(box.numel()) * width;
    }
  }
}

void ShardedFiles::read(size_t tensor, const Box& box, std::byte* to) const {
  for (const auto& part : parts_[tensor]) {
    const auto both = overlap(part.box, box);
    if (!both) continue;
    const auto width = safetensors::dtype_bytes(part.info->dtype);
    const auto bytes = part.file->bytes(*part.info);
    const auto strides = row_major_strides(part.box.sizes);
    const auto& first = part.box.offset;
    copy_overlap(
        part.box, bytes.data(), box, to, row_major_strides(box.sizes), width);
    auto last = both->offset;
    for (size_t d = 0; d < last.size(); ++d) last[d] += both->sizes[d] - 1;
    const auto begin =
        static_cast<size_t>(element_at(both->offset, first, strides));
    const auto end = static_cast<size_t>(element_at(last, first, strides)) + 1;
    part.file->forget(bytes.subspan(begin * width, (end - begin) * width));
  }
}

}  // namespace echelon
