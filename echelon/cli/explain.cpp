#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <memory>

#include "echelon/cli/command_line.h"
#include "echelon/cli/explain_print.h"
#include "echelon/cli/help.h"
#include "echelon/cli/terminal.h"
#include "echelon/cluster/catalogue.h"
#include "echelon/explain/explain.h"

namespace echelon::cli {
namespace {

struct ExplainArguments {
  std::string run;
  std::string cluster;
  bool json = false;
};

int explain(const ExplainArguments& arguments) {
  ExplainOptions options;
  if (!arguments.cluster.empty()) {
    options.cluster = find_cluster(arguments.cluster);
  }
  const RunExplanation run = explain_run(arguments.run, options);
  if (arguments.json) {
    print_explanation_json(run, std::cout);
    return 0;
  }
  ExplainStyle style{.colours = has_colours(1)};
  style.columns = std::clamp<size_t>(terminal_columns(style.columns), 40, 120);
  print_explanation_text(run, style, std::cout);
  return 0;
}

}  // namespace

void add_explain(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "explain",
      "say what held a run back, and what to set so that it trains faster");
  command->footer(
      "echelon explain runs/digits                       while it runs, too\n"
      "echelon explain runs/digits --cluster here.toml   with measured rates\n"
      "echelon explain elsewhere/timeline.json --json");
  auto arguments = std::make_shared<ExplainArguments>();
  command
      ->add_option(
          "RUN", arguments->run, "a run's folder, or its timeline.json")
      ->required();
  command
      ->add_option(
          "--cluster", arguments->cluster,
          "what fixes are simulated on: a cluster file, or devices as in "
          "h100-sxm:8 (this machine)")
      ->type_name("CLUSTER");
  command->add_flag("--json", arguments->json, "print JSON");
  command->callback([&action, arguments] {
    action = [arguments] { return explain(*arguments); };
  });
}

}  // namespace echelon::cli
