// A job's resolved configuration in a file for echelon-train, which is gone
// with the object.
#pragma once

#include <string>

#include "echelon/job/job.h"
#include "echelon/launch/scratch.h"

namespace echelon::cli {

class ScratchConfig {
 public:
  /// Throws ConfigError when the folder for temporary files cannot be written.
  explicit ScratchConfig(const Job& job);

  const std::string& path() const { return path_; }

 private:
  launch::ScratchFolder folder_;
  std::string path_;
};

}  // namespace echelon::cli
