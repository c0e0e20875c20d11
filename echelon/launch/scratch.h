// A folder for files that are needed while a command runs: the ranks' error
// reports, a configuration for echelon-train.
#pragma once

#include <string>

namespace echelon::launch {

/// In TMPDIR; removed when destroyed.
class ScratchFolder {
 public:
  /// Throws ConfigError when none can be made.
  ScratchFolder();
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace echelon::launch
