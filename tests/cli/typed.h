// Runs `echelon` through a shell.
#pragma once

#include <sys/wait.h>

#include <cstdlib>
#include <string>

#include "tests/support/places.h"
#include "tests/support/temp_folder.h"

namespace echelon {

struct Outcome {
  int exit_code = -1;  // 128: ended by a signal
  std::string out;
  std::string err;
};

/// Runs `echelon ARGUMENTS`, or the program `name`, in the test's folder
/// without input. `before` may set limits.
inline Outcome typed(
    const TempFolder& folder, const std::string& arguments,
    const std::string& before = "",
    const std::string& name = program("echelon")) {
  const std::string line = "cd '" + folder.path() + "' && { " + before + "'" +
                           name + "' " + arguments +
                           "\n} >out 2>err </dev/null";
  const int status = std::system(line.c_str());
  return {
      WIFEXITED(status) ? WEXITSTATUS(status) : 128,
      read_file(folder.path("out")), read_file(folder.path("err"))};
}

}  // namespace echelon
