// Writes one rank's file of a checkpoint, hashing it on the way. Free of
// LibTorch.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "echelon/checkpoint/format/manifest.h"

namespace echelon {

/// A slice to write; its bytes are borrowed for the call.
struct SliceBytes {
  std::string name;  // of the tensor
  SavedKind kind = SavedKind::parameter;
  std::string dtype;
  std::vector<int64_t> shape;  // of the full tensor
  Box box;
  std::span<const std::byte> bytes;  // row-major elements of the box
};

/// Writes FOLDER/NAME, a safetensors file (readable by any reader of that
/// format), and then FOLDER/NAME with ".part.json" in place of its extension:
/// this rank's RankPart. Syncs both. Further slices of a tensor have the keys
/// NAME#1, NAME#2, …. Without slices it writes a file without tensors.
///
/// Throws CheckpointError (path, bytes needed, bytes free, the system's reason)
/// after removing what it wrote, and ConfigError for wrong slices.
RankPart write_rank_file(
    const std::string& folder, const std::string& name,
    const std::vector<SliceBytes>& slices);

/// Writes the slices over the file at `path` instead, and its part nowhere.
/// After an error the file holds anything.
RankPart write_rank_file_over(
    const std::string& path, const std::vector<SliceBytes>& slices);

/// "rank-00012.safetensors"
std::string rank_file_name(int64_t rank);

}  // namespace echelon
