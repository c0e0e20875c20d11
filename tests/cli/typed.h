// Runs `echelon` through a shell.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/places.h"
#include "tests/support/temp_folder.h"

namespace echelon {

struct Outcome {
  int exit_code = -1;  // 128: ended by a signal
  std::string out;
  std::string err;
};

/// Runs a line of the shell in the folder, without input.
inline Outcome shell(const TempFolder& folder, const std::string& command) {
  const std::string line = "cd '" + folder.path() + "' && { " + command +
                           "\n} >out 2>err </dev/null";
  const int status = std::system(line.c_str());
  return {
      WIFEXITED(status) ? WEXITSTATUS(status) : 128,
      read_file(folder.path("out")), read_file(folder.path("err"))};
}

/// Runs `echelon ARGUMENTS`, or the program `name`, in the folder. `before` may
/// set limits.
inline Outcome typed(
    const TempFolder& folder, const std::string& arguments,
    const std::string& before = "",
    const std::string& name = program("echelon")) {
  return shell(folder, before + "'" + name + "' " + arguments);
}

/// What a command printed that must succeed.
inline std::string printed(const Outcome& outcome) {
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  return outcome.out;
}

inline std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

}  // namespace echelon
