#include "echelon/checkpoint/files/rank_file.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <map>
#include <set>
#include <utility>

#include "echelon/checkpoint/files/checksum_stream.h"
#include "echelon/checkpoint/files/write_behind.h"
#include "echelon/checkpoint/format/content_hash.h"
#include "echelon/checkpoint/format/new_file.h"
#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/checkpoint/format/safetensors_text.h"
#include "echelon/error.h"

namespace echelon {
namespace {

using safetensors::in_quotes;
using safetensors::shape_string;
using safetensors::TensorBytes;

// Small enough that what was hashed is copied from the processor's cache.
constexpr size_t kPieceBytes = 256 << 10;

[[noreturn]] void fail(
    const std::string& path, const SliceBytes& slice, const std::string& what) {
  throw ConfigError(path + ": tensor " + in_quotes(slice.name) + ": " + what);
}

void check_box(const std::string& path, const SliceBytes& slice) {
  if (!is_inside(slice.box, slice.shape)) {
    fail(
        path, slice,
        "the box at " + shape_string(slice.box.offset) + " of " +
            shape_string(slice.box.sizes) + " is not inside of its shape " +
            shape_string(slice.shape));
  }
}

/// The tensors of the slices, each once, and the key of each slice.
struct Keyed {
  std::vector<SavedTensor> tensors;
  std::vector<size_t> tensor_of;  // of each slice: index into tensors
  std::vector<TensorBytes> keys;  // of each slice
};

Keyed keyed(const std::string& path, const std::vector<SliceBytes>& slices) {
  Keyed out;
  std::map<std::string, size_t> index;
  for (const auto& slice : slices) {
    check_box(path, slice);
    const auto [at, added] = index.emplace(slice.name, out.tensors.size());
    if (added) {
      SavedTensor tensor;
      tensor.name = slice.name;
      tensor.kind = slice.kind;
      tensor.dtype = slice.dtype;
      tensor.shape = slice.shape;
      out.tensors.push_back(std::move(tensor));
    }
    const SavedTensor& tensor = out.tensors[at->second];
    if (tensor.kind != slice.kind || tensor.dtype != slice.dtype ||
        tensor.shape != slice.shape) {
      fail(
          path, slice,
          "one slice is of " + tensor.dtype + " " + shape_string(tensor.shape) +
              " (" + to_string(tensor.kind) + "), another of " + slice.dtype +
              " " + shape_string(slice.shape) + " (" + to_string(slice.kind) +
              "); all slices of a tensor must say the same");
    }
    out.tensor_of.push_back(at->second);
  }
  // A tensor may have the name that a slice of another would get.
  std::set<std::string> taken;
  for (const auto& tensor : out.tensors) taken.insert(tensor.name);
  std::vector<int64_t> next(out.tensors.size(), 0);
  for (size_t i = 0; i < slices.size(); ++i) {
    int64_t& number = next[out.tensor_of[i]];
    std::string key = slices[i].name;
    if (number == 0) {
      number = 1;
    } else {
      do {
        key = slices[i].name + "#" + std::to_string(number++);
      } while (!taken.insert(key).second);
    }
    out.tensors[out.tensor_of[i]].slices.push_back({slices[i].box, 0, key});
    out.keys.push_back(
        {key, slices[i].dtype, slices[i].box.sizes, slices[i].bytes});
  }
  return out;
}

/// Appends to a file and takes the checksums of its blocks.
class HashedFile {
 public:
  HashedFile(const std::string& path, uint64_t bytes)
      : file(path, bytes, NewFile::Under::at_path), behind_(file, bytes) {}

  NewFile file;
  std::vector<std::string> blocks;
  int64_t bytes = 0;

  void append(std::span<const std::byte> data) {
    while (!data.empty()) {
      const auto piece =
          data.first(std::min({data.size(), kBlock - in_block_, kPieceBytes}));
      sum_.update(piece.data(), piece.size());
      behind_.append(piece);
      in_block_ += piece.size();
      if (in_block_ == kBlock) end_block();
      data = data.subspan(piece.size());
    }
  }
  void finish() {
    if (in_block_ > 0) end_block();
    behind_.finish();
    file.finish();
  }

 private:
  static constexpr auto kBlock = static_cast<size_t>(kChecksumBlockBytes);

  void end_block() {
    bytes += static_cast<int64_t>(in_block_);
    in_block_ = 0;
    blocks.push_back(sum_.digest());
  }

  ChecksumStream sum_;
  size_t in_block_ = 0;
  WriteBehind behind_;
};

}  // namespace

RankPart write_rank_file(
    const std::string& folder, const std::string& name,
    const std::vector<SliceBytes>& slices) {
  const std::string path = folder + "/" + name;
  Keyed keyed_slices = keyed(path, slices);
  const auto& keys = keyed_slices.keys;
  // "pt": what others call tensors laid out as PyTorch's.
  const auto plan = safetensors::plan_file(path, keys, {{"format", "pt"}});

  HashedFile out(path, plan.bytes);
  out.append(std::as_bytes(std::span(plan.head)));
  for (const auto* tensor : plan.order) {
    out.append(tensor->bytes);
    // The disk is at work meanwhile.
    const auto i = static_cast<size_t>(tensor - keys.data());
    SavedTensor& saved = keyed_slices.tensors[keyed_slices.tensor_of[i]];
    saved.hash =
        saved.hash + hash_elements(
                         saved.shape, slices[i].box, tensor->bytes.data(),
                         safetensors::dtype_bytes(saved.dtype));
  }
  out.finish();

  RankPart part;
  part.tensors = std::move(keyed_slices.tensors);
  part.file = {name, out.bytes, std::move(out.blocks)};
  const std::string text = to_json(part);
  NewFile json(
      std::filesystem::path(path).replace_extension(".part.json").string(),
      text.size(), NewFile::Under::at_path);
  json.append(text.data(), text.size());
  json.finish();
  json.keep();
  out.file.keep();
  return part;
}

std::string rank_file_name(int64_t rank) {
  std::array<char, 64> name;
  std::snprintf(
      name.data(), name.size(), "rank-%05lld.safetensors",
      static_cast<long long>(rank));
  return name.data();
}

}  // namespace echelon
