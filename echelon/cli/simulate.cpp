#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "echelon/cli/command_line.h"
#include "echelon/cli/simulate_table.h"

namespace echelon::cli {
namespace {

struct SimulateArguments {
  std::string table;
  bool json = false;
};

}  // namespace

void add_simulate(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "simulate", "say how long a step takes and what memory it needs, without a GPU");
  command->footer(
      "echelon simulate --table steps.csv           how far predictions are from steps\n"
      "echelon simulate --table steps.csv --json    every row's time and memory");
  auto arguments = std::make_shared<SimulateArguments>();
  command
      ->add_option(
          "--table",
          arguments->table,
          "predict every row of a table of steps (doc/published.md has its columns)")
      ->type_name("F.csv")
      ->required();
  command->add_flag("--json", arguments->json, "print every row as JSON");
  command->callback([&action, arguments] {
    action = [arguments] {
      return simulate_table(arguments->table, arguments->json);
    };
  });
}

}  // namespace echelon::cli
