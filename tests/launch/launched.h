// The launcher's test programs, as commands of a test.
#pragma once

#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/places.h"
#include "tests/support/process.h"

namespace echelon::testing_support {

/// launch_run with `options`, for `program`.
inline std::vector<std::string> launch(
    std::vector<std::string> options, const std::vector<std::string>& program) {
  options.insert(options.begin(), test_program("launch_run"));
  options.push_back("--");
  options.insert(options.end(), program.begin(), program.end());
  return options;
}

/// launch_rank with `arguments`.
inline std::vector<std::string>
rank_program(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), test_program("launch_rank"));
  return arguments;
}

/// The words of a text.
inline std::vector<std::string> words(const std::string& text) {
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), {}};
}

inline std::string last_line(const Command& job) {
  const auto lines = job.err_lines();
  return lines.empty() ? "" : lines.back();
}

}  // namespace echelon::testing_support
