// The rules of manifests, checked when one is made and when one is read.
// Private to this folder.
#pragma once

#include <string>

#include "echelon/checkpoint/format/manifest.h"

namespace echelon {

/// Errors are CheckpointErrors whose text begins with `place`.
///
/// Checks a tensor by itself: name, dtype, shape, and that its slices lie
/// inside of it and in one of `num_files` files; not that they cover it.
void check_tensor(
    const SavedTensor& tensor, size_t num_files, const std::string& place);
/// Checks a file by itself.
void check_file(const SavedFile& file, const std::string& place);
/// Checks each tensor and file, that names are unique, that slices cover their
/// tensors and have unique keys, and that files have room for them.
void check_contents(
    const CheckpointManifest& manifest, const std::string& place);

/// 32 hexadecimal digits, lower case.
bool is_checksum(const std::string& text);
std::string hash_text(const ContentHash& hash);

}  // namespace echelon
