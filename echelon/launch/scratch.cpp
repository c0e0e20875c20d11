#include "echelon/launch/scratch.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::launch {

ScratchFolder::ScratchFolder() {
  const char* base = std::getenv("TMPDIR");
  path_ = std::string(base != nullptr && *base != '\0' ? base : "/tmp") +
          "/echelon-XXXXXX";
  if (mkdtemp(path_.data()) == nullptr) {
    throw ConfigError(format(
        "cannot make a folder {}: {}; TMPDIR names the place for it", path_,
        std::strerror(errno)));
  }
}

ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace echelon::launch
