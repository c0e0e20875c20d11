#include <sys/ioctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>

#include "echelon/cli/command_line.h"
#include "echelon/cli/findings.h"
#include "echelon/cli/help.h"
#include "echelon/cluster/catalogue.h"
#include "echelon/cluster/cluster_file.h"
#include "echelon/error.h"
#include "echelon/text/table.h"

namespace echelon::cli {
namespace {

using Level = Finding::Level;

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

std::string colour(Level level) {
  if (!has_colours(1)) return "";
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

// Columns of the terminal; without one, lines are not broken.
size_t screen_width() {
  winsize size{};
  const bool known = ::isatty(1) == 1 && ::ioctl(1, TIOCGWINSZ, &size) == 0 &&
                     size.ws_col > 60;
  return known ? size.ws_col : std::numeric_limits<size_t>::max();
}

constexpr size_t kWordWidth = 7;    // "warning"
constexpr size_t kTopicWidth = 13;  // "locked memory"

void print(const Finding& finding) {
  const std::string end = has_colours(1) ? "\033[0m" : "";
  const std::string level = word(finding.level);
  std::cout << "  " << colour(finding.level) << level << end
            << std::string(kWordWidth - level.size() + 2, ' ') << finding.topic
            << std::string(
                   kTopicWidth - std::min(kTopicWidth, columns(finding.topic)) +
                       2,
                   ' ')
            << finding.text << "\n";
  if (!finding.remedy.empty()) {
    constexpr size_t kIndent = 2 + kWordWidth + 2 + kTopicWidth + 2;
    std::cout << std::string(kIndent, ' ')
              << wrapped("remedy: " + finding.remedy, kIndent, screen_width())
              << "\n";
  }
  std::cout.flush();
}

void print_sum(int warnings, int errors) {
  const auto counted = [](int number, const char* what) {
    return std::to_string(number) + " " + what + (number == 1 ? "" : "s");
  };
  if (errors > 0) {
    std::cout << "\n"
              << counted(errors, "error") << " and "
              << counted(warnings, "warning") << "\n";
  } else if (warnings > 0) {
    std::cout << "\nno errors, " << counted(warnings, "warning") << "\n";
  } else {
    std::cout << "\nall is well\n";
  }
}

int doctor(bool json) {
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
    std::cout << rows.dump(2) << "\n";
  } else {
    print_sum(warnings, errors);
  }
  return errors > 0 ? 1 : 0;
}

int print_cluster() {
  std::cout << to_toml(find_cluster("local"));
  return 0;
}

}  // namespace

void add_doctor(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "doctor", "look at this machine and say what is amiss, with its remedy");
  command->footer(
      "echelon doctor\nechelon doctor --json\n"
      "echelon doctor --cluster > here.toml");
  auto json = std::make_shared<bool>(false);
  auto cluster = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "print the findings as JSON");
  command->add_flag(
      "--cluster", *cluster,
      "print this machine as a cluster file (TOML) and nothing else");
  command->callback([&action, json, cluster] {
    action = [json, cluster] {
      if (*json && *cluster) {
        throw ConfigError(
            "--json and --cluster: the cluster is printed as TOML; give one "
            "of the two");
      }
      return *cluster ? print_cluster() : doctor(*json);
    };
  });
}

}  // namespace echelon::cli
