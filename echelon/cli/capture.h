// Runs a program and keeps what it prints.
#pragma once

#include <chrono>
#include <string>
#include <utility>
#include <vector>

namespace echelon::cli {

struct Captured {
  int exit_code = -1;      // 128 + signal for a signal; -1: could not start
  bool timed_out = false;  // it was killed
  std::string out;
  std::string err;
};

/// Runs `command` (an absolute path and arguments) with `variables` added to
/// the environment, until it ends or `limit` passes; then it is killed. Keeps
/// at most 1 MiB of each stream.
Captured capture(
    const std::vector<std::string>& command, std::chrono::milliseconds limit,
    const std::vector<std::pair<std::string, std::string>>& variables = {});

}  // namespace echelon::cli
