// A job's resolved configuration in a file for echelon-train, which is gone with the
// object.
#pragma once

#include <filesystem>
#include <string>

#include "echelon/train/job.h"

namespace echelon::cli {

class ScratchConfig {
 public:
  /// Throws ConfigError when the folder for temporary files cannot be written.
  explicit ScratchConfig(const Job& job);
  ~ScratchConfig();
  ScratchConfig(const ScratchConfig&) = delete;
  ScratchConfig& operator=(const ScratchConfig&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::filesystem::path folder_;
  std::string path_;
};

}  // namespace echelon::cli
