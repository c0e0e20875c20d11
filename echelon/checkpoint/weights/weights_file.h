// Writes a checkpoint's model as one safetensors file, in little memory. Free
// of LibTorch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/checkpoint/files/reader.h"

namespace echelon {

/// Writes the parameters and buffers of these names (empty: all) to `path`
/// atomically, as safetensors::write does.
///
///   memory_bytes  that copies take at a time, about
///
/// Throws what reading and writing throw, and CheckpointError for a name that
/// is not there.
void write_weights(
    CheckpointReader& reader, const std::string& path,
    const std::vector<std::string>& names = {},
    int64_t memory_bytes = 64 << 20);

}  // namespace echelon
