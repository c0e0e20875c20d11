#include "echelon/cli/scratch_config.h"

#include <fstream>

#include "echelon/error.h"

namespace echelon::cli {

ScratchConfig::ScratchConfig(const Job& job)
    : path_(folder_.path() + "/config.toml") {
  std::ofstream file(path_);
  file << to_toml(job);
  file.close();
  if (!file) {
    throw ConfigError(path_ + ": cannot be written; is the disk full?");
  }
}

}  // namespace echelon::cli
