// Runs a script in the virtual environment of `make extras`, the one with
// Python's PyTorch. A test that needs it begins with ECHELON_NEED_PYTHON().
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

namespace echelon {

/// The interpreter; empty when `make extras` has not been run.
inline std::string python() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  std::string cache = variable("ECHELON_CACHE");
  if (cache.empty()) {
    const std::string base = variable("XDG_CACHE_HOME");
    cache = (base.empty() ? variable("HOME") + "/.cache" : base) + "/echelon";
  }
  const std::filesystem::path home = cache + "/pytorch-2.11.0";
  return std::filesystem::exists(home / "complete")
             ? (home / "bin" / "python").string()
             : "";
}

#define ECHELON_NEED_PYTHON()                                         \
  if (::echelon::python().empty()) {                                  \
    GTEST_SKIP() << "needs Python's PyTorch: run `make extras` once"; \
  }

/// Runs tests/`script` with `arguments` and returns what it printed. Throws
/// with its output when it does not end with 0.
inline std::string run_python(
    const std::string& script, const std::vector<std::string>& arguments) {
  const auto quoted = [](const std::string& word) {
    std::string text = "'";
    for (char c : word) {
      text += c == '\'' ? std::string("'\\''") : std::string(1, c);
    }
    return text + "'";
  };
  std::string command = "OMP_NUM_THREADS=1 " + quoted(python()) + " " +
                        quoted(ECHELON_SOURCE_DIR "/tests/" + script);
  for (const auto& argument : arguments) {
    command += " " + quoted(argument);
  }
  std::FILE* pipe = ::popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) {
    throw std::runtime_error("cannot start " + command);
  }
  std::string output;
  std::array<char, 4096> buffer;
  for (size_t n; (n = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) {
    output.append(buffer.data(), n);
  }
  const int status = ::pclose(pipe);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    throw std::runtime_error(command + " failed:\n" + output);
  }
  return output;
}

}  // namespace echelon
