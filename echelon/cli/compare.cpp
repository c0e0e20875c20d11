#include <CLI/CLI.hpp>
#include <filesystem>
#include <iostream>
#include <memory>

#include "echelon/cli/command_line.h"
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
          ": is no run folder, it has no timeline.json; name a folder that "
          "`echelon train` wrote to its end");
    }
    folders.emplace_back(run);
  }
  const fs::path parent = fs::absolute(arguments.out).parent_path();
  std::error_code error;
  if (!fs::is_directory(parent, error)) {
    throw ConfigError(
        arguments.out + ": there is no folder " + parent.string() +
        "; make it first");
  }
  write_strategy_page(arguments.out, arguments.title, folders);
  std::cout << "report: " << arguments.out << "\n";
  return 0;
}

}  // namespace

void add_compare(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "compare",
      "put several runs on one page: their figures in a table, and the picture "
      "of a typical step of each");
  command->footer(
      "echelon compare runs/one runs/two\n"
      "echelon compare runs/* -o compare.html --title 'Digits, three ways'");
  auto arguments = std::make_shared<CompareArguments>();
  command->add_option("RUN", arguments->runs, "run folders")->required();
  command->add_option("-o,--output", arguments->out, "the page to write")
      ->type_name("FILE")
      ->capture_default_str();
  command->add_option("--title", arguments->title, "heading of the page")
      ->type_name("TEXT");
  command->callback([&action, arguments] {
    action = [arguments] { return compare(*arguments); };
  });
}

}  // namespace echelon::cli
