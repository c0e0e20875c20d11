#include "echelon/checkpoint/format/manifest.h"

// The hash's code is compiled into this file alone.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <unordered_map>
#include <utility>

#include "echelon/checkpoint/format/manifest_check.h"
#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/checkpoint/format/safetensors_text.h"
#include "echelon/error.h"

namespace echelon {
namespace {

using safetensors::in_quotes;

void append_hex(std::string& text, uint64_t value) {
  for (int shift = 60; shift >= 0; shift -= 4) {
    text += "0123456789abcdef"[value >> shift & 15];
  }
}

/// Adds what `part` has of a tensor to what others have of it.
void add_tensor(
    SavedTensor& sum, const SavedTensor& part, int64_t file,
    const std::string& file_name) {
  if (part.kind != sum.kind || part.dtype != sum.dtype ||
      part.shape != sum.shape) {
    const auto shown = [](const SavedTensor& tensor) {
      return to_string(tensor.kind) + " " + tensor.dtype + " " +
             safetensors::shape_string(tensor.shape);
    };
    throw CheckpointError(
        file_name + ": tensor " + in_quotes(part.name) + " is " + shown(part) +
        ", but " + shown(sum) + " for the ranks before; all ranks must agree");
  }
  sum.hash = sum.hash + part.hash;
  for (const auto& slice : part.slices) {
    sum.slices.push_back(slice);
    sum.slices.back().file = file;
  }
}

}  // namespace

std::string to_string(SavedKind kind) {
  switch (kind) {
    case SavedKind::parameter:
      return "parameter";
    case SavedKind::buffer:
      return "buffer";
    case SavedKind::optimizer:
      return "optimizer";
    case SavedKind::random:
      break;
  }
  return "random";
}

const SavedTensor* CheckpointManifest::find(const std::string& name) const {
  const auto found = std::find_if(
      tensors.begin(), tensors.end(),
      [&](const auto& tensor) { return tensor.name == name; });
  return found == tensors.end() ? nullptr : &*found;
}

std::string hash_text(const ContentHash& hash) {
  std::string text;
  append_hex(text, hash[0]);
  append_hex(text, hash[1]);
  return text;
}

std::string checksum(const void* bytes, size_t size) {
  const XXH128_hash_t hash = XXH3_128bits(bytes, size);
  return hash_text({hash.high64, hash.low64});
}

std::string content_hash(const CheckpointManifest& manifest) {
  std::string text = "echelon contents 1\n";
  const auto line = [&](const char* key, const std::string& value) {
    text += std::string(key) + " " + value + "\n";
  };
  line("step", std::to_string(manifest.step));
  line("skipped_steps", std::to_string(manifest.skipped_steps));
  line("total_steps", std::to_string(manifest.total_steps));
  line("epoch", std::to_string(manifest.epoch));
  line("consumed", std::to_string(manifest.consumed));
  line("seed", std::to_string(manifest.seed));
  if (manifest.loss_scale) {
    std::string bits;
    append_hex(bits, std::bit_cast<uint64_t>(manifest.loss_scale->scale));
    line(
        "loss_scale", bits + " " +
                          std::to_string(manifest.loss_scale->good_steps) +
                          " " + std::to_string(manifest.loss_scale->overflows));
  }
  std::vector<const SavedTensor*> tensors;
  for (const auto& tensor : manifest.tensors) {
    if (tensor.kind != SavedKind::random) tensors.push_back(&tensor);
  }
  std::sort(tensors.begin(), tensors.end(), [](const auto* a, const auto* b) {
    return a->name < b->name;
  });
  for (const auto* tensor : tensors) {
    // The name comes last: it may have spaces.
    text += to_string(tensor->kind) + " " + tensor->dtype + " " +
            safetensors::shape_string(tensor->shape) + " " +
            hash_text(tensor->hash) + " " + tensor->name + "\n";
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
