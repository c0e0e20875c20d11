#include "echelon/cli/scratch_config.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "echelon/error.h"

namespace echelon::cli {

namespace fs = std::filesystem;

ScratchConfig::ScratchConfig(const Job& job) {
  std::string name = (fs::temp_directory_path() / "echelon-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) {
    throw ConfigError(
        name + ": cannot be made: " + std::strerror(errno) +
        "; set TMPDIR to a folder that can be written");
  }
  folder_ = name;
  path_ = (folder_ / "config.toml").string();
  std::ofstream file(path_);
  file << to_toml(job);
  file.close();
  if (!file) {
    throw ConfigError(path_ + ": cannot be written; is the disk full?");
  }
}

ScratchConfig::~ScratchConfig() {
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
}

}  // namespace echelon::cli
