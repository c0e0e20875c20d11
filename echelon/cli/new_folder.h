// A folder that a command writes: it appears complete, or not at all.
#pragma once

#include <filesystem>
#include <string>

namespace echelon::cli {

/// Throws ConfigError unless the parent folder of `out` exists.
void check_parent(const std::filesystem::path& out);

/// Files are written to ".OUT.part-PROCESS" in the same parent folder, which is
/// removed unless move_into_place() was reached. Leftovers of processes that
/// were killed are removed as well.
class NewFolder {
 public:
  /// Throws ConfigError when `out` exists and is not an empty folder, or when
  /// its parent does not exist; CheckpointError when the disk refuses.
  explicit NewFolder(const std::filesystem::path& out);
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;
  ~NewFolder();

  /// The folder to write to.
  const std::filesystem::path& path() const { return part_; }
  /// Writes a file in it. Throws CheckpointError.
  void write(const std::string& name, const std::string& text) const;
  /// Synchronises files and folders, and gives them their name. Throws
  /// CheckpointError.
  void move_into_place();

 private:
  std::filesystem::path out_;
  std::filesystem::path part_;  // empty: nothing to remove
  int claim_ = -1;              // descriptor of part_
};

}  // namespace echelon::cli
