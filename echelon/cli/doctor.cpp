#include "echelon/cli/doctor.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "echelon/cli/build_info.h"
#include "echelon/cli/command_line.h"
#include "echelon/cli/programs.h"
#include "echelon/cli/terminal.h"
#include "echelon/cluster/catalogue.h"
#include "echelon/cluster/cluster_file.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/table.h"

namespace echelon::cli {
namespace {

namespace fs = std::filesystem;
using Level = Finding::Level;

/// From lines of the loader: `libtorch_cpu.so => /lib/libtorch_cpu.so (0x7f…)`.
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

/// The wheel has its version in torch/version.py, LibTorch's archive in
/// build-version.
std::string torch_version(const fs::path& library) {
  const fs::path root = library.parent_path().parent_path();
  std::ifstream wheel(root / "version.py");
  for (std::string line; std::getline(wheel, line);) {
    if (!line.starts_with("__version__")) continue;
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

/// The microseconds of the first all_reduce among the rows of `text`: a list,
/// an object that has one, or a row on each line. Negative when there is none.
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
        "LibTorch", Level::error,
        "echelon-train is not in the folder of this program",
        "build with LibTorch (ECHELON_LIBTORCH, or make build) and install "
        "both programs"};
  }
  const auto libraries = libraries_of(program);
  if (!libraries.missing.empty()) {
    return {
        "LibTorch", Level::error,
        "echelon-train does not start: " + libraries.missing.front() +
            " is not found",
        "build again if LibTorch was moved, or name its lib folder in "
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
  if (!version.starts_with("2.11")) {
    return {
        "LibTorch", Level::error, text,
        "echelon needs 2.11; set ECHELON_LIBTORCH to such a copy and "
        "build again"};
  }
  return {"LibTorch", Level::ok, text, ""};
}

/// Two ranks sum 1 MiB; takes at most a minute.
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
        "all_reduce", Level::error, "two ranks do not finish within 60 s",
        "try it by hand: echelon bench collectives -n 2 --backend gloo"};
  }
  const double microseconds = all_reduce_microseconds(result.out);
  if (result.exit_code != 0 || microseconds < 0) {
    const std::string said = last_line(result.err);
    return {
        "all_reduce", Level::error,
        format(
            "two ranks fail with exit code {}{}", result.exit_code,
            said.empty() ? "" : ": " + said),
        "try it by hand: echelon bench collectives -n 2"};
  }
  return {
      "all_reduce", Level::ok,
      format("two ranks sum 1 MiB in {:.0f} us (local)", microseconds), ""};
}

const char* word(Level level) {
  switch (level) {
    case Level::ok:
      return "ok";
    case Level::warning:
      return "warning";
    case Level::error:
      return "error";
  }
  return "?";
}

const char* colour(Level level) {
  switch (level) {
    case Level::ok:
      return "\033[32m";
    case Level::warning:
      return "\033[33m";
    case Level::error:
      return "\033[31;1m";
  }
  return "";
}

constexpr size_t kWordWidth = 7;    // "warning"
constexpr size_t kTopicWidth = 13;  // "locked memory"

void print(const Finding& finding) {
  // Without a terminal, lines are not wrapped.
  const Style style = terminal_style(std::numeric_limits<size_t>::max());
  const std::string level = word(finding.level);
  std::cout << "  " << (style.colours ? colour(finding.level) : "") << level
            << (style.colours ? "\033[0m" : "")
            << std::string(kWordWidth - level.size() + 2, ' ') << finding.topic
            << std::string(kTopicWidth + 2 - columns(finding.topic), ' ')
            << finding.text << "\n";
  if (!finding.remedy.empty()) {
    constexpr size_t kIndent = 2 + kWordWidth + 2 + kTopicWidth + 2;
    std::cout << std::string(kIndent, ' ')
              << wrapped(
                     "remedy: " + finding.remedy, kIndent,
                     std::max<size_t>(style.columns, 60))
              << "\n";
  }
  std::cout.flush();
}

void print_sum(int warnings, int errors) {
  if (errors > 0) {
    std::cout << format(
        "\n{} and {}\n", counted(errors, "error"),
        counted(warnings, "warning"));
  } else if (warnings > 0) {
    std::cout << "\nno errors, " << counted(warnings, "warning") << "\n";
  } else {
    std::cout << "\nno errors, no warnings\n";
  }
}

int examine(bool json) {
  auto rows = nlohmann::ordered_json::array();
  int warnings = 0, errors = 0;
  for (auto* find :
       {find_compiler, find_libtorch, find_processor, find_memory, find_gpus,
        find_links, find_local_cluster, find_shared_memory, find_memfd,
        find_pidfd, find_open_files, find_processes, find_locked_memory,
        find_ports, find_hostname, find_all_reduce}) {
    const Finding finding = find();
    warnings += finding.level == Level::warning;
    errors += finding.level == Level::error;
    if (json) {
      rows.push_back(
          {{"topic", finding.topic},
           {"level", word(finding.level)},
           {"text", finding.text},
           {"remedy", finding.remedy}});
    } else {
      print(finding);
    }
  }
  if (json) {
    print_json(rows, std::cout);
  } else {
    print_sum(warnings, errors);
  }
  return errors > 0 ? 1 : 0;
}

struct DoctorArguments {
  bool json = false;
  bool cluster = false;
};

int doctor(const DoctorArguments& arguments) {
  if (!arguments.cluster) return examine(arguments.json);
  if (arguments.json) {
    throw ConfigError(
        "--json and --cluster: the cluster is printed as TOML; give one of the "
        "two");
  }
  std::cout << to_toml(find_cluster("local"));
  return 0;
}

struct VersionArguments {
  bool json = false;
};

int print_version(const VersionArguments& arguments) {
  if (!arguments.json) {
    std::cout << "echelon " << build_info::kVersion << "\n";
    return 0;
  }
  const nlohmann::ordered_json json = {
      {"version", build_info::kVersion},
      {"compiler", build_info::kCompiler},
      {"build_type", build_info::kBuildType}};
  std::cout << json.dump() << "\n";
  return 0;
}

}  // namespace

void add_doctor(Command& root) {
  auto [command, arguments] = root.add(
      "doctor", "check this machine, and name a remedy for each problem",
      "echelon doctor\nechelon doctor --json\n"
      "echelon doctor --cluster > here.toml",
      doctor);
  command.flag("--json", arguments.json, "print the findings as JSON");
  command.flag(
      "--cluster", arguments.cluster,
      "print this machine as a cluster file (TOML) and nothing else");
}

void add_version(Command& root) {
  auto [command, arguments] = root.add(
      "version", "print the version", "echelon version\nechelon version --json",
      print_version);
  command.flag("--json", arguments.json, "print it as JSON");
}

}  // namespace echelon::cli
