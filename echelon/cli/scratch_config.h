// A job's resolved configuration in a file for echelon-train, which is gone with the
// object.
#pragma once

#include <string>

#include "echelon/train/job.h"

namespace echelon::cli {

/// A new folder for temporary files, which is gone with the object.
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

class ScratchConfig {
 public:
  /// Throws ConfigError when the folder for temporary files cannot be written.
  explicit ScratchConfig(const Job& job);

  const std::string& path() const { return path_; }

 private:
  ScratchFolder folder_;
  std::string path_;
};

}  // namespace echelon::cli
