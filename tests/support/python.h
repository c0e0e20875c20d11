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

#include "tests/support/places.h"

namespace echelon {

/// The interpreter; empty when `make extras` has not been run.
inline std::string pytorch_python() {
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
  if (::echelon::pytorch_python().empty()) {                          \
    GTEST_SKIP() << "needs Python's PyTorch: run `make extras` once"; \
  }

/// Whether the environment has the package.
inline bool has_python_package(const std::string& name) {
  return !pytorch_python().empty() &&
         std::system((pytorch_python() +
                      " -c 'import importlib.util as u; "
                      "exit(u.find_spec(\"" +
                      name + "\") is None)'")
                         .c_str()) == 0;
}

/// The same for tests that need a package that is not part of PyTorch.
#define ECHELON_NEED_PACKAGE(name)                      \
  if (!::echelon::has_python_package(name)) {           \
    GTEST_SKIP() << "needs Python's package " << (name) \
                 << ": run `make extras` once";         \
  }
#define ECHELON_NEED_TRANSFORMERS() ECHELON_NEED_PACKAGE("transformers")

namespace detail {

inline std::string run_interpreter(const std::vector<std::string>& words) {
  std::string command = "OMP_NUM_THREADS=1";
  for (const auto& word : words) {
    command += " '";
    for (const char c : word) {
      command += c == '\'' ? std::string("'\\''") : std::string(1, c);
    }
    command += "'";
  }
  std::FILE* pipe = ::popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) {
    throw std::runtime_error("cannot start " + words.at(0));
  }
  std::string output;
  std::array<char, 4096> part;
  while (const size_t got = std::fread(part.data(), 1, part.size(), pipe)) {
    output.append(part.data(), got);
  }
  const int status = ::pclose(pipe);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    throw std::runtime_error("Python failed:\n" + output);
  }
  return output;
}

}  // namespace detail

/// What the program `code` prints; it finds `arguments` in sys.argv[1:]. Throws
/// with all of its output when it does not end with 0. One thread.
inline std::string
run_python(const std::string& code, const std::vector<std::string>& arguments) {
  std::vector<std::string> words = {pytorch_python(), "-c", code};
  words.insert(words.end(), arguments.begin(), arguments.end());
  return detail::run_interpreter(words);
}

/// The same for the file tests/`script`.
inline std::string run_python_script(
    const std::string& script, const std::vector<std::string>& arguments) {
  std::vector<std::string> words = {
      pytorch_python(), source_path("tests/") + script};
  words.insert(words.end(), arguments.begin(), arguments.end());
  return detail::run_interpreter(words);
}

}  // namespace echelon
