#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "echelon/cli/arguments.h"
#include "echelon/cli/build_info.h"
#include "echelon/cli/capture.h"
#include "echelon/cli/findings.h"
#include "echelon/error.h"

namespace echelon::cli {
namespace {

namespace fs = std::filesystem;
using Level = Finding::Level;

// `  libtorch_cpu.so => /path/lib/libtorch_cpu.so (0x7f…)`, as the loader
// prints.
struct Libraries {
  std::string torch;                 // path of libtorch_cpu.so
  std::vector<std::string> missing;  // names
};

Libraries libraries_of(const std::string& program) {
  const auto listed = capture(
      {program}, std::chrono::seconds(20), {{"LD_TRACE_LOADED_OBJECTS", "1"}});
  Libraries libraries;
  std::istringstream lines(listed.out);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string name, arrow, path;
    words >> name >> arrow >> path;
    if (arrow != "=>") continue;
    if (path == "not") libraries.missing.push_back(name);
    if (name == "libtorch_cpu.so") libraries.torch = path;
  }
  return libraries;
}

// The wheel says its version in torch/version.py; LibTorch's archive in
// build-version.
std::string torch_version(const fs::path& library) {
  const fs::path root = library.parent_path().parent_path();
  std::ifstream wheel(root / "version.py");
  for (std::string line; std::getline(wheel, line);) {
    if (line.rfind("__version__", 0) != 0) continue;
    const size_t begin = line.find('\'');
    const size_t end = line.rfind('\'');
    if (begin < end) return line.substr(begin + 1, end - begin - 1);
  }
  std::ifstream archive(root / "build-version");
  std::string line;
  std::getline(archive, line);
  return line.empty() ? "of unknown version" : line;
}

std::string last_line(const std::string& text) {
  std::istringstream lines(text);
  std::string last;
  for (std::string line; std::getline(lines, line);) {
    if (!line.empty()) last = line;
  }
  return last;
}

// The microseconds of the first all_reduce among the rows: a list, an object
// with one, or one row a line. Negative when there is none.
double all_reduce_microseconds(const std::string& text) {
  using nlohmann::json;
  std::vector<json> rows;
  const auto add = [&](const json& value) {
    if (value.is_object() && value.contains("operation")) rows.push_back(value);
    if (!value.is_structured()) return;
    for (const auto& item : value) {
      if (item.is_object()) rows.push_back(item);
      if (!item.is_array()) continue;
      for (const auto& row : item) rows.push_back(row);
    }
  };
  const auto whole = json::parse(text, nullptr, false);
  if (!whole.is_discarded()) {
    add(whole);
  } else {
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      add(json::parse(line, nullptr, false));
    }
  }
  for (const auto& row : rows) {
    if (row.is_object() && row.value("operation", "") == "all_reduce") {
      return row.value("microseconds", -1.0);
    }
  }
  return -1;
}

}  // namespace

Finding find_compiler() {
  return {
      "built with", Level::ok,
      std::string(build_info::kCompiler) + ", " + build_info::kBuildType, ""};
}

Finding find_libtorch() {
  std::string program;
  try {
    program = find_echelon_train();
  } catch (const Error& error) {
    return {
        "LibTorch", Level::error, "echelon-train is not beside this program",
        "build with LibTorch (ECHELON_LIBTORCH, or make build) and install "
        "both programs"};
  }
  const auto libraries = libraries_of(program);
  if (!libraries.missing.empty()) {
    return {
        "LibTorch", Level::error,
        "echelon-train does not start: " + libraries.missing.front() +
            " is not found",
        "build again after a move of LibTorch, or name its lib folder in "
        "LD_LIBRARY_PATH"};
  }
  if (libraries.torch.empty()) {
    return {
        "LibTorch", Level::error, "echelon-train does not load libtorch_cpu.so",
        "build again with ECHELON_LIBTORCH set"};
  }
  const std::string version = torch_version(libraries.torch);
  const std::string text =
      version + ", " + fs::path(libraries.torch).parent_path().string();
  if (version.rfind("2.11", 0) != 0) {
    return {
        "LibTorch", Level::error, text,
        "echelon is made for 2.11; set ECHELON_LIBTORCH to such a copy and "
        "build again"};
  }
  return {"LibTorch", Level::ok, text, ""};
}

Finding find_all_reduce() {
  std::error_code error;
  const auto self = fs::read_symlink("/proc/self/exe", error);
  try {
    find_echelon_train();
  } catch (const Error&) {
    return {
        "all_reduce", Level::error, "not tried: there is no echelon-train",
        "see LibTorch above"};
  }
  const auto result = capture(
      {self.string(), "bench", "collectives", "--backend", "local", "-n", "2",
       "--bytes", "1048576", "--json"},
      std::chrono::seconds(60));
  if (result.timed_out) {
    return {
        "all_reduce", Level::error, "two ranks do not meet within 60 s",
        "try it by hand: echelon bench collectives -n 2 --backend gloo"};
  }
  const double microseconds = all_reduce_microseconds(result.out);
  if (result.exit_code != 0 || microseconds < 0) {
    const std::string said = last_line(result.err);
    return {
        "all_reduce", Level::error,
        "two ranks fail with exit code " + std::to_string(result.exit_code) +
            (said.empty() ? "" : ": " + said),
        "try it by hand: echelon bench collectives -n 2"};
  }
  char text[80];
  std::snprintf(
      text, sizeof(text), "two ranks sum 1 MiB in %.0f us (local)",
      microseconds);
  return {"all_reduce", Level::ok, text, ""};
}

}  // namespace echelon::cli
