#include "echelon/cli/scratch_config.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "echelon/error.h"

namespace echelon::cli {

namespace fs = std::filesystem;

ScratchFolder::ScratchFolder()
    : path_((fs::temp_directory_path() / "echelon-XXXXXX").string()) {
  if (::mkdtemp(path_.data()) == nullptr) {
    throw ConfigError(
        path_ + ": cannot be made: " + std::strerror(errno) +
        "; set TMPDIR to a folder that can be written");
  }
}

ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

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
