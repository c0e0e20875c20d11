// Checkpoints for tests: tensors of random bytes, sharded at random.
#pragma once

#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "echelon/checkpoint/files/rank_file.h"
#include "echelon/checkpoint/format/safetensors.h"

namespace echelon {

using Random = std::mt19937_64;

inline int64_t random_below(Random& random, int64_t end) {
  return std::uniform_int_distribution<int64_t>(0, end - 1)(random);
}

struct WholeTensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;

  size_t element_bytes() const { return safetensors::dtype_bytes(dtype); }
};

inline WholeTensor random_tensor(
    const std::string& name, const std::string& dtype,
    const std::vector<int64_t>& shape, Random& random) {
  WholeTensor tensor{name, dtype, shape, {}};
  tensor.bytes.resize(
      static_cast<size_t>(whole_box(shape).numel()) * tensor.element_bytes());
  for (size_t i = 0; i < tensor.bytes.size(); i += 8) {
    const uint64_t number = random();
    std::memcpy(
        tensor.bytes.data() + i, &number,
        std::min<size_t>(8, tensor.bytes.size() - i));
  }
  return tensor;
}

template <typename Value>
WholeTensor tensor_of(
    const std::string& name, const std::string& dtype,
    const std::vector<int64_t>& shape, const std::vector<Value>& values) {
  WholeTensor tensor{name, dtype, shape, {}};
  tensor.bytes.resize(values.size() * sizeof(Value));
  std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
  return tensor;
}

/// Calls visit(element of the box, element of the full tensor), row-major, in
/// the simplest way, as a reference.
template <typename Visit>
void each_element(
    const std::vector<int64_t>& shape, const Box& box, Visit&& visit) {
  const int64_t numel = box.numel();
  for (int64_t i = 0; i < numel; ++i) {
    int64_t rest = i, whole = 0, stride = 1;
    for (size_t d = shape.size(); d-- > 0;) {
      whole += (box.offset[d] + rest % box.sizes[d]) * stride;
      rest /= box.sizes[d];
      stride *= shape[d];
    }
    visit(static_cast<size_t>(i), static_cast<size_t>(whole));
  }
}

inline std::vector<std::byte>
part_of(const WholeTensor& tensor, const Box& box) {
  const size_t width = tensor.element_bytes();
  std::vector<std::byte> bytes(static_cast<size_t>(box.numel()) * width);
  each_element(tensor.shape, box, [&](size_t i, size_t whole) {
    std::memcpy(
        bytes.data() + i * width, tensor.bytes.data() + whole * width, width);
  });
  return bytes;
}

/// At most `count` boxes that cover the box, made by splitting it repeatedly.
inline std::vector<Box>
random_cuts(const Box& box, int64_t count, Random& random) {
  std::vector<Box> boxes = {box};
  while (static_cast<int64_t>(boxes.size()) < count) {
    const auto i = static_cast<size_t>(
        random_below(random, static_cast<int64_t>(boxes.size())));
    if (boxes[i].sizes.empty()) break;
    const auto d = static_cast<size_t>(
        random_below(random, static_cast<int64_t>(boxes[i].sizes.size())));
    if (boxes[i].sizes[d] < 2) {
      --count;  // it may be a single element
      continue;
    }
    const int64_t at = 1 + random_below(random, boxes[i].sizes[d] - 1);
    Box second = boxes[i];
    boxes[i].sizes[d] = at;
    second.offset[d] += at;
    second.sizes[d] -= at;
    boxes.push_back(std::move(second));
  }
  return boxes;
}

inline Box random_box(const std::vector<int64_t>& shape, Random& random) {
  Box box = whole_box(shape);
  for (size_t d = 0; d < shape.size(); ++d) {
    box.sizes[d] = 1 + random_below(random, shape[d]);
    box.offset[d] = random_below(random, shape[d] - box.sizes[d] + 1);
  }
  return box;
}

inline void
write_manifest(const std::string& folder, const CheckpointManifest& manifest) {
  std::ofstream(folder + "/manifest.json", std::ios::binary)
      << to_json(manifest);
}

/// Slices of one rank, with memory of their own.
struct RankSlices {
  std::vector<std::vector<std::byte>> memory;
  std::vector<SliceBytes> slices;

  RankSlices() = default;
  /// All of these tensors.
  explicit RankSlices(const std::vector<WholeTensor>& tensors) {
    for (const auto& tensor : tensors) add(tensor, whole_box(tensor.shape));
  }

  void add(const WholeTensor& tensor, const Box& box) {
    memory.push_back(part_of(tensor, box));
    slices.push_back(
        {tensor.name, SavedKind::parameter, tensor.dtype, tensor.shape, box,
         memory.back()});
  }
};

/// Writes the ranks' files, without a manifest.
inline std::vector<RankPart> write_rank_files(
    const std::string& folder, const std::vector<RankSlices>& ranks) {
  std::filesystem::create_directories(folder);
  std::vector<RankPart> parts;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    parts.push_back(write_rank_file(
        folder, rank_file_name(static_cast<int64_t>(rank)),
        ranks[rank].slices));
  }
  return parts;
}

/// Writes the ranks' files and the manifest of all; returns it.
inline CheckpointManifest write_checkpoint(
    const std::string& folder, const std::vector<RankSlices>& ranks) {
  const std::vector<RankPart> parts = write_rank_files(folder, ranks);
  CheckpointManifest manifest;
  manifest.step = 100;
  manifest.layout = "dp=" + std::to_string(ranks.size());
  manifest.ranks = static_cast<int64_t>(ranks.size());
  manifest.config = "[model]\nname = \"none\"\n";
  manifest.config_hash =
      checksum(manifest.config.data(), manifest.config.size());
  add_parts(manifest, parts);
  write_manifest(folder, manifest);
  return manifest;
}

/// The same for full tensors, each split into up to `cuts` boxes with random
/// ranks.
inline CheckpointManifest write_random_checkpoint(
    const std::string& folder, const std::vector<WholeTensor>& tensors,
    int64_t num_ranks, int64_t cuts, Random& random) {
  std::vector<RankSlices> ranks(static_cast<size_t>(num_ranks));
  for (const auto& tensor : tensors) {
    for (const Box& box : random_cuts(whole_box(tensor.shape), cuts, random)) {
      ranks[static_cast<size_t>(random_below(random, num_ranks))].add(
          tensor, box);
    }
  }
  return write_checkpoint(folder, ranks);
}

}  // namespace echelon
