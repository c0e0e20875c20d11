// Text files, written so that a reader never sees half of one.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace echelon {

/// Replaces the file at `path`: writes a file next to it, which is then
/// renamed. Creates missing folders. Throws Error with the path and the
/// system's reason (disk full, no permission); an earlier file at `path` is
/// then unchanged.
void write_file_atomically(
    const std::filesystem::path& path, std::string_view text);

/// Writes to an open file, also when signals interrupt it, and removes from
/// `text` what was written. Returns 0, or errno of the call that failed.
int write_all(int file, std::string_view& text);

/// The user's folder for Echelon: $XDG_CONFIG_HOME/echelon, in ~/.config where
/// that is not set. Empty without a home. It may not exist.
std::filesystem::path configuration_folder();

/// The user's folder for what can be made again: $ECHELON_CACHE, else
/// $XDG_CACHE_HOME/echelon, in ~/.cache where that is not set. Empty without a
/// home. It may not exist.
std::filesystem::path cache_folder();

/// Throws DataError when the file cannot be read.
std::string read_text_file(const std::filesystem::path& path);

}  // namespace echelon
