// The cases of the local backend that threads and processes share. Each is run
// by every rank and throws std::runtime_error when a value is wrong.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <string>
#include <vector>

namespace echelon::local::testing {

struct Case {
  std::string name;
  void (*run)(c10d::Backend& backend);
};

std::vector<Case> cases();

}  // namespace echelon::local::testing
