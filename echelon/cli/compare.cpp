#include <filesystem>
#include <iostream>

#include "echelon/cli/command_line.h"
#include "echelon/cli/new_folder.h"
#include "echelon/error.h"
#include "echelon/report/strategy_page.h"

namespace echelon::cli {
namespace {

namespace fs = std::filesystem;

struct CompareArguments {
  std::vector<std::string> runs;
  std::string out = "compare.html";
  std::string title = "Runs side by side";
};

int compare(const CompareArguments& arguments) {
  std::vector<fs::path> folders;
  for (const auto& run : arguments.runs) {
    std::error_code error;
    if (!fs::is_regular_file(fs::path(run) / "timeline.json", error)) {
      throw ConfigError(
          run +
          ": is not the folder of a finished run: it has no timeline.json; "
          "name a run that `echelon train` has completed");
    }
    folders.emplace_back(run);
  }
  check_parent(arguments.out);
  report::write_strategy_page(arguments.out, arguments.title, folders);
  std::cout << "report: " << arguments.out << "\n";
  return 0;
}

}  // namespace

void add_compare(Command& root) {
  auto [command, arguments] = root.add(
      "compare",
      "compare runs on one page: their figures in a table, and a drawing of a "
      "typical step of each",
      "echelon compare runs/one runs/two\n"
      "echelon compare runs/* -o compare.html --title 'Digits, three ways'",
      compare);
  command.positionals("RUN", arguments.runs, "run folders");
  command.option(
      "-o,--output", arguments.out, "FILE",
      "the page to write (default: compare.html)");
  command.option("--title", arguments.title, "TEXT", "heading of the page");
}

}  // namespace echelon::cli
