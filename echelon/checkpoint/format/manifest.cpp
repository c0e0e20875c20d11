// check_contents() refuses what could lead a reader astray: names that leave
// the folder, slices that overlap, leave a gap or claim more bytes than their
// file has. So code that reads tensors trusts a manifest that was parsed. The
// content hash covers what training continues from, and neither the layout nor
// the files: equal states that other numbers of ranks have saved hash alike.
#include "echelon/checkpoint/format/manifest.h"

#include <algorithm>
#include <array>
#include <bit>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "echelon/checkpoint/format/manifest_check.h"
#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/checkpoint/format/safetensors_text.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using safetensors::quote_printable;
using safetensors::shape_string;

template <typename... Values>
[[noreturn]] void fail(
    const std::string& place,
    std::type_identity_t<detail::FormatPattern<sizeof...(Values)>> what,
    const Values&... values) {
  throw CheckpointError(place + ": " + format(what, values...));
}

std::string tensor_place(const std::string& place, const SavedTensor& tensor) {
  return place + ": tensor " + quote_printable(tensor.name);
}

std::string file_place(const std::string& place, const SavedFile& file) {
  return place + ": file " + quote_printable(file.name);
}

/// Whether `name` may name a file in the checkpoint's own folder.
bool is_file_name(const std::string& name) {
  return !name.empty() && name.size() <= 255 && name[0] != '.' &&
         name != "manifest.json" &&
         std::none_of(name.begin(), name.end(), [](unsigned char c) {
           return c < 32 || c == 127 || c == '/' || c == '\\';
         });
}

void check_slice(
    const SavedTensor& tensor, const SavedSlice& slice, size_t num_files,
    const std::string& here) {
  if (!is_inside(slice.box, tensor.shape)) {
    fail(
        here, "a slice of {} at {} is not inside of its shape {}",
        shape_string(slice.box.sizes), shape_string(slice.box.offset),
        shape_string(tensor.shape));
  }
  if (slice.file < 0 || static_cast<size_t>(slice.file) >= num_files) {
    fail(here, "a slice is in file number {} of {}", slice.file, num_files);
  }
  if (slice.key.empty() || slice.key == "__metadata__") {
    fail(
        here, "{} is no key of a tensor in a file", quote_printable(slice.key));
  }
}

/// Adds a rank's slices of a tensor to those of the ranks before.
void add_tensor(
    SavedTensor& sum, const SavedTensor& part, int64_t file,
    const std::string& file_name) {
  if (part.kind != sum.kind || part.dtype != sum.dtype ||
      part.shape != sum.shape) {
    const auto shown = [](const SavedTensor& tensor) {
      return format(
          "{} {} {}", to_string(tensor.kind), tensor.dtype,
          shape_string(tensor.shape));
    };
    throw CheckpointError(format(
        "{}: tensor {} is {}, but {} for the ranks before; all ranks must "
        "agree",
        file_name, quote_printable(part.name), shown(part), shown(sum)));
  }
  sum.hash = sum.hash + part.hash;
  for (const auto& slice : part.slices) {
    sum.slices.push_back(slice);
    sum.slices.back().file = file;
  }
}

}  // namespace

std::string to_string(SavedKind kind) {
  static constexpr std::array kNames = {
      "parameter", "buffer", "optimizer", "random"};
  return kNames.at(static_cast<size_t>(kind));
}

const SavedTensor* CheckpointManifest::find(const std::string& name) const {
  const auto found = std::find_if(
      tensors.begin(), tensors.end(),
      [&](const auto& tensor) { return tensor.name == name; });
  return found == tensors.end() ? nullptr : &*found;
}

bool is_checksum(const std::string& text) {
  return text.size() == 32 &&
         text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

void check_tensor(
    const SavedTensor& tensor, size_t num_files, const std::string& place) {
  const std::string here = tensor_place(place, tensor);
  if (tensor.name.empty()) fail(here, "a tensor needs a name");
  const uint64_t width = safetensors::dtype_bytes(tensor.dtype);
  if (width == 0) {
    fail(
        here, "unknown dtype {}; known are {}", quote_printable(tensor.dtype),
        safetensors::known_dtypes());
  }
  if (tensor.shape.size() > safetensors::kMaxDims) {
    fail(
        here, "{} dimensions; at most {} are allowed", tensor.shape.size(),
        safetensors::kMaxDims);
  }
  if (!safetensors::tensor_bytes(tensor.shape, width)) {
    fail(
        here, "shape {} of {} is negative or overflows 63 bits",
        shape_string(tensor.shape), tensor.dtype);
  }
  for (const auto& slice : tensor.slices) {
    check_slice(tensor, slice, num_files, here);
  }
}

void check_file(const SavedFile& file, const std::string& place) {
  const std::string here = file_place(place, file);
  if (!is_file_name(file.name)) {
    fail(
        here,
        "no name of a file in the checkpoint's folder: slashes, a dot in "
        "front, control characters and manifest.json are not allowed");
  }
  if (file.bytes < 0) fail(here, "{} bytes", file.bytes);
  const int64_t blocks = file.bytes / kChecksumBlockBytes +
                         (file.bytes % kChecksumBlockBytes != 0 ? 1 : 0);
  if (static_cast<int64_t>(file.blocks.size()) != blocks) {
    fail(
        here, "{} bytes are {} blocks, but it has the checksums of {}",
        file.bytes, blocks, file.blocks.size());
  }
  for (const auto& block : file.blocks) {
    if (is_checksum(block)) continue;
    fail(
        here, "{} is no checksum: 32 hexadecimal digits, lower case",
        quote_printable(block));
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
            here, "another slice has the key {} in file {} already",
            quote_printable(slice.key), quote_printable(file));
      }
      const int64_t bytes = slice.box.numel() * width;
      if (bytes > room[number]) {
        fail(
            here, "file {} of {} bytes has no room for all its slices",
            quote_printable(file), files[number].bytes);
      }
      room[number] -= bytes;
      boxes.push_back(slice.box);
    }
    const std::string gap = find_gap(tensor.shape, boxes);
    if (!gap.empty()) {
      fail(
          here, "{}; slices must cover its shape {}, each element once", gap,
          shape_string(tensor.shape));
    }
  }
}

std::string hash_text(const ContentHash& hash) {
  return format("{:016x}{:016x}", hash[0], hash[1]);
}

std::string content_hash(const CheckpointManifest& manifest) {
  std::string text = format(
      "echelon contents 1\nstep {}\nskipped_steps {}\ntotal_steps {}\n"
      "epoch {}\nconsumed {}\nseed {}\n",
      manifest.step, manifest.skipped_steps, manifest.total_steps,
      manifest.epoch, manifest.consumed, manifest.seed);
  if (const auto& scale = manifest.loss_scale) {
    text += format(
        "loss_scale {:016x} {} {}\n", std::bit_cast<uint64_t>(scale->scale),
        scale->good_steps, scale->overflows);
  }
  std::vector<const SavedTensor*> tensors;
  for (const auto& tensor : manifest.tensors) {
    // Random states belong to ranks, and would tell layouts apart.
    if (tensor.kind != SavedKind::random) tensors.push_back(&tensor);
  }
  std::ranges::sort(tensors, {}, &SavedTensor::name);
  for (const auto* tensor : tensors) {
    // The name comes last: it may have spaces.
    text += format(
        "{} {} {} {} {}\n", to_string(tensor->kind), tensor->dtype,
        shape_string(tensor->shape), hash_text(tensor->hash), tensor->name);
  }
  return checksum(text.data(), text.size());
}

void add_parts(
    CheckpointManifest& manifest, const std::vector<RankPart>& parts) {
  manifest.tensors.clear();
  manifest.files.clear();
  std::unordered_map<std::string, size_t> places;
  for (const auto& part : parts) {
    const auto file = static_cast<int64_t>(manifest.files.size());
    manifest.files.push_back(part.file);
    for (const auto& tensor : part.tensors) {
      const auto [place, is_new] =
          places.emplace(tensor.name, manifest.tensors.size());
      if (is_new) {
        SavedTensor empty = tensor;
        empty.slices.clear();
        empty.hash = {};
        manifest.tensors.push_back(std::move(empty));
      }
      add_tensor(manifest.tensors[place->second], tensor, file, part.file.name);
    }
  }
  check_contents(manifest, "step " + std::to_string(manifest.step));
  manifest.config_hash =
      checksum(manifest.config.data(), manifest.config.size());
  manifest.content_hash = content_hash(manifest);
}

}  // namespace echelon
