#include "tests/support/places.h"

namespace echelon {

std::string source_path(const std::string& name) {
  return std::string(ECHELON_SOURCE_DIR) + (name.empty() ? "" : "/") + name;
}

std::string program(const std::string& name) {
  return std::string(ECHELON_BUILD_DIR) + "/bin/" + name;
}

std::string test_program(const std::string& name) {
  return std::string(ECHELON_BUILD_DIR) + "/tests/" + name;
}

}  // namespace echelon
