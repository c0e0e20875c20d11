// Names in a folder of checkpoints, and calls of the file system that throw
// CheckpointError.
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
inline constexpr const char* kLock = "LOCK";
inline constexpr const char* kSeenByAll = ".seen-by-all-";
inline constexpr const char* kAside = "damaged-";
inline constexpr const char* kManifest = "manifest.json";

/// "step-00000100"
std::string step_name(int64_t step);
/// The step of such a name; none for what step_name() would not have made.
std::optional<int64_t> step_of(std::string_view name);
/// ".step-00000100.removed"
fs::path removed_path(const fs::path& folder, int64_t step);
/// Whether a running save, or a crash, left a file of this name.
bool is_debris(std::string_view name);
/// Whether a run gives this name to an entry of its folder of checkpoints.
bool has_name_of_run(std::string_view name);
/// Whether a complete checkpoint is there.
bool is_checkpoint(const fs::path& path);
/// The step that the file (LATEST or .LATEST.new) names; none when there is no
/// such file or it holds no checkpoint's name.
std::optional<int64_t> named_step(const fs::path& file);

/// Throws "PATH: DOING failed: REASON; …", with the bytes that are free there
/// and, if they are known, those that are needed.
[[noreturn]] void fail(
    const fs::path& path, const std::string& doing, int error,
    int64_t needed_bytes = -1);

/// Bytes that a user may still write there; -1 when they are unknown.
int64_t free_bytes(const fs::path& path);

/// Makes the folder and its parents, and syncs each.
void make_folder(const fs::path& path);
void sync_file(const fs::path& path);
void sync_folder(const fs::path& path);
/// Writes and syncs a file, in place of an older one; does not sync its folder.
void write_file(const fs::path& path, std::string_view text);
std::string read_file(const fs::path& path);
void rename_path(const fs::path& from, const fs::path& to);
/// Removes a file, or a folder with its contents, if it exists.
void remove_path(const fs::path& path);

}  // namespace echelon::folder_files
