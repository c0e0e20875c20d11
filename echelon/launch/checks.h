// What can be known to be wrong before a rank starts.
#pragma once

#include <string>

#include "echelon/launch/options.h"

namespace echelon::launch {

/// More on one host is a slip of the finger.
constexpr int kMaxRanksPerHost = 1024;

/// Throws ConfigError for options that no host could run.
void check(const LaunchOptions& options);

/// The file that `program` names: as it is when it has a slash, else looked up
/// in PATH. Throws ConfigError when there is none, it is a folder, it may not
/// be executed, or what its first line asks for is missing.
std::string find_program(const std::string& program);

/// What a failed execve of `path` means, in words with a way out.
std::string explain_exec_error(const std::string& path, int error);

}  // namespace echelon::launch
