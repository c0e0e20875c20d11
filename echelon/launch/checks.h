// The checks of a launch before any rank starts.
#pragma once

#include <string>

#include "echelon/launch/options.h"

namespace echelon::launch {

/// More ranks on one host are taken for a typing error.
constexpr int kMaxRanksPerHost = 1024;

/// Throws ConfigError for options that are out of range.
void check(const LaunchOptions& options);

/// The file that `program` names: itself when it has a slash, else looked up in
/// PATH. Throws ConfigError when there is no such file, it is a folder, it may
/// not be executed, or the interpreter in its first line is missing.
std::string find_program(const std::string& program);

/// The message for a failed execve of `path`, with a way out.
std::string explain_exec_error(const std::string& path, int error);

}  // namespace echelon::launch
