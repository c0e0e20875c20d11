// The rules of manifests, for who makes one and who reads one. Not for others.
#pragma once

#include <string>

#include "echelon/checkpoint/format/manifest.h"

namespace echelon {

inline constexpr const char* kManifestFormat = "echelon checkpoint";
inline constexpr const char* kPartFormat = "echelon checkpoint part";
/// A text ends with these, a checksum between them: of all bytes before them.
inline constexpr const char* kChecksumKey = "\"checksum\": \"";
inline constexpr const char* kChecksumEnd = "\"\n}\n";

/// All CheckpointErrors begin with `place`.
///
/// A tensor by itself: name, dtype, shape; slices inside of it, with
/// `num_files` files. Not whether they cover it.
void check_tensor(
    const SavedTensor& tensor, size_t num_files, const std::string& place);
/// A file by itself.
void check_file(const SavedFile& file, const std::string& place);
/// All of it: each of the above, that names are unique, slices cover tensors
/// and have keys of their own, and files have room for them.
void check_contents(
    const CheckpointManifest& manifest, const std::string& place);

/// 32 hexadecimal digits, lower case.
bool is_checksum(const std::string& text);
std::string hash_text(const ContentHash& hash);

}  // namespace echelon
