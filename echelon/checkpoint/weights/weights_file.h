// A checkpoint's model as one safetensors file, without ever having it whole in
// memory. Free of LibTorch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/checkpoint/files/reader.h"

namespace echelon {

/// Writes the tensors of these names (parameters and buffers; empty: all of
/// those) to `path`, as safetensors::write does: the old file or the whole new
/// one is seen.
///
///   memory_bytes  of the copies that are held at a time, about
///
/// Throws what reading and writing throw, and CheckpointError for a name that
/// is not there.
void write_weights(
    CheckpointReader& reader, const std::string& path,
    const std::vector<std::string>& names = {},
    int64_t memory_bytes = 64 << 20);

}  // namespace echelon
