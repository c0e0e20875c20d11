#include <CLI/CLI.hpp>
#include <memory>

#include "echelon/cli/arguments.h"
#include "echelon/cli/command_line.h"
#include "echelon/cli/scratch_config.h"
#include "echelon/error.h"
#include "echelon/launch/launch.h"

namespace echelon::cli {
namespace {

struct VerifyArguments {
  JobArguments job;
  std::string steps;
  std::string tolerance;
  bool json = false;
  bool plant_error = false;
};

double parse_tolerance(const std::string& text) {
  size_t used = 0;
  double value = -1;
  try {
    value = std::stod(text, &used);
  } catch (const std::exception&) {
  }
  if (used != text.size() || !(value >= 0 && value < 1)) {
    throw ConfigError(
        "--tolerance " + text + ": must be a number, at least 0 and below 1");
  }
  return value;
}

int verify(const VerifyArguments& arguments) {
  Job job = load(arguments.job);
  if (job.train.steps == 0 && job.train.epochs == 0) job.train.steps = 1;
  check(arguments.job, job);

  std::vector<std::string> command = {find_echelon_train(), "verify"};
  const ScratchConfig config(job);
  command.push_back(config.path());
  if (!arguments.steps.empty()) {
    parse_count("--steps", arguments.steps, 1, 1 << 30);
    command.insert(command.end(), {"--steps", arguments.steps});
  }
  if (!arguments.tolerance.empty()) {
    parse_tolerance(arguments.tolerance);
    command.insert(command.end(), {"--tolerance", arguments.tolerance});
  }
  if (arguments.json) command.push_back("--json");
  if (arguments.plant_error) command.push_back("--plant-error");

  launch::LaunchOptions options;
  options.num_ranks = static_cast<int>(job.layout.num_ranks());
  if (job.train.ranks == "threads") {
    command.insert(
        command.end(), {"--threads", std::to_string(options.num_ranks)});
    options.num_ranks = 1;
  }
  options.command = command;
  options.terminal = launch::Terminal::rank_zero;
  options.listen_early = true;
  options.answer_code = static_cast<int>(ExitCode::failure);  // they differ
  return launch::run(options);
}

}  // namespace

void add_verify(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "verify",
      "prove that the layout computes what one rank computes: losses, every "
      "gradient and every parameter, in float64");
  command->footer(
      "echelon verify first.toml -n 4\n"
      "echelon verify first.toml --layout dp=2 --steps 5 --json");
  auto arguments = std::make_shared<VerifyArguments>();
  add_job_arguments(*command, arguments->job, true);
  command->add_option("--steps", arguments->steps, "steps that are compared")
      ->type_name("STEPS");
  command
      ->add_option(
          "--tolerance",
          arguments->tolerance,
          "largest relative difference (1e-10)")
      ->type_name("NUMBER");
  command->add_flag("--json", arguments->json, "print the result as JSON");
  // For tests of verify itself: a factor of 2 in one gradient.
  command->add_flag("--plant-error", arguments->plant_error)->group("");
  command->callback([&action, arguments] {
    action = [arguments] { return verify(*arguments); };
  });
}

}  // namespace echelon::cli
