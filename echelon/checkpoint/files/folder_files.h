// What the sources of folder.h share: names in a folder of checkpoints, and
// calls of the file system that throw CheckpointError. Not for others.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace echelon::folder_files {

namespace fs = std::filesystem;

inline constexpr const char* kLatest = "LATEST";
inline constexpr const char* kNextLatest = ".LATEST.new";
inline constexpr const char* kAside = "damaged-";
inline constexpr const char* kManifest = "manifest.json";

/// "step-00000100"
std::string step_name(int64_t step);
/// The step of such a name; none for all that step_name() would not have made.
std::optional<int64_t> step_of(std::string_view name);
/// ".step-00000100.removed"
fs::path removed_path(const fs::path& folder, int64_t step);
/// Left by a crash, when nobody writes.
bool is_debris(std::string_view name);
/// Whether there is a whole checkpoint.
bool is_checkpoint(const fs::path& path);
/// What LATEST, or the file of that name, says; none when it is not there or
/// says nothing that a checkpoint is called.
std::optional<int64_t> named_step(const fs::path& file);

/// "PATH: DOING failed: REASON; …", with the bytes that are free there and, if
/// they are known, those that are needed.
[[noreturn]] void fail(
    const fs::path& path, const std::string& doing, int error,
    int64_t needed_bytes = -1);

/// Bytes that a user may still write there; -1 when the file system does not
/// say.
int64_t free_bytes(const fs::path& path);

/// With the folders that lead to it, each synchronised.
void make_folder(const fs::path& path);
void sync_file(const fs::path& path);
void sync_folder(const fs::path& path);
/// A new file, synchronised; an older one is replaced. Its folder is not.
void write_file(const fs::path& path, std::string_view text);
std::string read_file(const fs::path& path);
void rename_path(const fs::path& from, const fs::path& to);
/// A file, or a folder with all that is in it; nothing when it is not there.
void remove_path(const fs::path& path);

}  // namespace echelon::folder_files
