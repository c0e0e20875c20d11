#include "echelon/checkpoint/format/manifest_check.h"

#include <algorithm>
#include <string_view>
#include <unordered_set>

#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/checkpoint/format/safetensors_text.h"
#include "echelon/error.h"

namespace echelon {
namespace {

using safetensors::in_quotes;

[[noreturn]] void fail(const std::string& place, const std::string& what) {
  throw CheckpointError(place + ": " + what);
}

std::string tensor_place(const std::string& place, const SavedTensor& tensor) {
  return place + ": tensor " + in_quotes(tensor.name);
}

std::string file_place(const std::string& place, const SavedFile& file) {
  return place + ": file " + in_quotes(file.name);
}

/// Whether `name` is that of a file in the checkpoint's own folder.
bool is_file_name(const std::string& name) {
  return !name.empty() && name.size() <= 255 && name[0] != '.' &&
         name != "manifest.json" &&
         std::none_of(name.begin(), name.end(), [](unsigned char c) {
           return c < 32 || c == 127 || c == '/' || c == '\\';
         });
}

void check_slice(
    const SavedTensor& tensor, const SavedSlice& slice, size_t num_files,
    const std::string& place) {
  if (!is_inside(slice.box, tensor.shape)) {
    fail(
        tensor_place(place, tensor),
        "a slice of " + safetensors::shape_string(slice.box.sizes) + " at " +
            safetensors::shape_string(slice.box.offset) +
            " is not inside of its shape " +
            safetensors::shape_string(tensor.shape));
  }
  if (slice.file < 0 || static_cast<size_t>(slice.file) >= num_files) {
    fail(
        tensor_place(place, tensor), "a slice is in file number " +
                                         std::to_string(slice.file) + " of " +
                                         std::to_string(num_files));
  }
  if (slice.key.empty() || slice.key == "__metadata__") {
    fail(
        tensor_place(place, tensor),
        in_quotes(slice.key) + " is no key of a tensor in a file");
  }
}

}  // namespace

bool is_checksum(const std::string& text) {
  return text.size() == 32 &&
         text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

void check_tensor(
    const SavedTensor& tensor, size_t num_files, const std::string& place) {
  const auto refuse = [&](const std::string& what) {
    fail(tensor_place(place, tensor), what);
  };
  if (tensor.name.empty()) refuse("a tensor needs a name");
  const uint64_t width = safetensors::dtype_bytes(tensor.dtype);
  if (width == 0) {
    refuse(
        "unknown dtype " + in_quotes(tensor.dtype) + "; known are " +
        safetensors::known_dtypes());
  }
  if (tensor.shape.size() > safetensors::kMaxDims) {
    refuse(
        std::to_string(tensor.shape.size()) + " dimensions; at most " +
        std::to_string(safetensors::kMaxDims) + " are allowed");
  }
  if (!safetensors::tensor_bytes(tensor.shape, width)) {
    refuse(
        "shape " + safetensors::shape_string(tensor.shape) + " of " +
        tensor.dtype + " is negative or overflows 63 bits");
  }
  for (const auto& slice : tensor.slices) {
    check_slice(tensor, slice, num_files, place);
  }
}

void check_file(const SavedFile& file, const std::string& place) {
  const auto refuse = [&](const std::string& what) {
    fail(file_place(place, file), what);
  };
  if (!is_file_name(file.name)) {
    refuse(
        "no name of a file in the checkpoint's folder: slashes, a dot in "
        "front, control characters and manifest.json are not allowed");
  }
  if (file.bytes < 0) refuse(std::to_string(file.bytes) + " bytes");
  const int64_t blocks = file.bytes / kChecksumBlockBytes +
                         (file.bytes % kChecksumBlockBytes != 0 ? 1 : 0);
  if (static_cast<int64_t>(file.blocks.size()) != blocks) {
    refuse(
        std::to_string(file.bytes) + " bytes are " + std::to_string(blocks) +
        " blocks, but it has the checksums of " +
        std::to_string(file.blocks.size()));
  }
  for (const auto& block : file.blocks) {
    if (!is_checksum(block)) {
      refuse(
          in_quotes(block) +
          " is no checksum: 32 hexadecimal digits, lower case");
    }
  }
}

void check_contents(
    const CheckpointManifest& manifest, const std::string& place) {
  const auto& files = manifest.files;
  std::unordered_set<std::string_view> file_names;
  for (const auto& file : files) {
    check_file(file, place);
    if (!file_names.insert(file.name).second) {
      fail(file_place(place, file), "it is listed twice");
    }
  }
  std::unordered_set<std::string_view> names;
  std::vector<std::unordered_set<std::string_view>> keys(files.size());
  std::vector<int64_t> room;
  for (const auto& file : files) room.push_back(file.bytes);
  std::vector<Box> boxes;
  for (const auto& tensor : manifest.tensors) {
    check_tensor(tensor, files.size(), place);
    const std::string here = tensor_place(place, tensor);
    if (!names.insert(tensor.name).second) fail(here, "it is listed twice");
    const auto width =
        static_cast<int64_t>(safetensors::dtype_bytes(tensor.dtype));
    boxes.clear();
    for (const auto& slice : tensor.slices) {
      const auto number = static_cast<size_t>(slice.file);
      const std::string& file = files[number].name;
      if (!keys[number].insert(slice.key).second) {
        fail(
            here, "another slice has the key " + in_quotes(slice.key) +
                      " in file " + in_quotes(file) + " already");
      }
      const int64_t bytes = slice.box.numel() * width;
      if (bytes > room[number]) {
        fail(
            here, "file " + in_quotes(file) + " of " +
                      std::to_string(files[number].bytes) +
                      " bytes has no room for all its slices");
      }
      room[number] -= bytes;
      boxes.push_back(slice.box);
    }
    const std::string gap = find_gap(tensor.shape, boxes);
    if (!gap.empty()) {
      fail(
          here, gap + "; slices must cover its shape " +
                    safetensors::shape_string(tensor.shape) +
                    ", each element once");
    }
  }
}

}  // namespace echelon
