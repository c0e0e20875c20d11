// A folder that a command writes: there whole, or not at all.
#pragma once

#include <filesystem>
#include <string>

namespace echelon::cli {

/// Throws ConfigError unless there is a folder to make `out` in.
void check_parent(const std::filesystem::path& out);

/// Its files are written beside it, in ".OUT.part-PROCESS", which is removed
/// again unless move_into_place() was reached. Those that processes which were
/// killed left are removed as well.
class NewFolder {
 public:
  /// Throws ConfigError when `out` is there already (an empty folder may be) or
  /// has no folder to be made in, CheckpointError when the disk does not let
  /// us.
  explicit NewFolder(const std::filesystem::path& out);
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;
  ~NewFolder();

  /// Where to write.
  const std::filesystem::path& path() const { return part_; }
  /// Writes a file in it. Throws CheckpointError.
  void write(const std::string& name, const std::string& text) const;
  /// Synchronises files and folders, and gives them their name. Throws
  /// CheckpointError.
  void move_into_place();

 private:
  std::filesystem::path out_;
  std::filesystem::path part_;  // empty: nothing to remove
  int claim_ = -1;              // part_, open
};

}  // namespace echelon::cli
