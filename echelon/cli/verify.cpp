#include <CLI/CLI.hpp>
#include <memory>

#include "echelon/cli/arguments.h"
#include "echelon/cli/command_line.h"
#include "echelon/cli/scratch_config.h"
#include "echelon/error.h"
#include "echelon/launch/launch.h"
#include "echelon/launch/scratch.h"

namespace echelon::cli {
namespace {

struct VerifyArguments {
  JobArguments job;
  std::string steps;
  std::string tolerance;
  bool resume = false;
  std::string then;
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

Job checked(const JobArguments& arguments) {
  Job job = load(arguments);
  if (job.train.steps == 0 && job.train.epochs == 0) job.train.steps = 1;
  check(arguments, job);
  return job;
}

// Of one layout; `more`: arguments of echelon-train.
int start(
    const Job& job, const VerifyArguments& arguments,
    const std::vector<std::string>& more) {
  std::vector<std::string> command = {find_echelon_train(), "verify"};
  const ScratchConfig config(job);
  command.push_back(config.path());
  command.insert(command.end(), more.begin(), more.end());
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

int verify(const VerifyArguments& arguments) {
  if (arguments.resume != !arguments.then.empty()) {
    throw ConfigError(
        "echelon verify: --resume saves with --layout and goes on with --then; "
        "give both, as in --resume --layout dp=2 --then tp=2");
  }
  const Job job = checked(arguments.job);
  if (!arguments.resume) return start(job, arguments, {});
  JobArguments second = arguments.job;
  second.overrides.layout = arguments.then;
  second.overrides.num_ranks = 0;
  const Job then = checked(second);
  const launch::ScratchFolder folder;
  const int failed = start(job, arguments, {"--save", folder.path()});
  return failed != 0 ? failed
                     : start(then, arguments, {"--resume", folder.path()});
}

}  // namespace

void add_verify(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "verify",
      "prove that the layout computes what one rank computes: losses, every "
      "gradient and every parameter, in float64");
  command->footer(
      "echelon verify first.toml -n 4\n"
      "echelon verify first.toml --layout dp=2 --steps 5 --json\n"
      "echelon verify first.toml --resume --layout dp=2 --then tp=2");
  auto arguments = std::make_shared<VerifyArguments>();
  command->add_flag(
      "--resume", arguments->resume,
      "save after the steps, go on with --then, and compare the steps after "
      "that "
      "with those of one rank that never stopped");
  command->add_option("--then", arguments->then, "--resume: the second layout")
      ->type_name("LAYOUT");
  add_job_arguments(*command, arguments->job, true);
  command->add_option("--steps", arguments->steps, "steps that are compared")
      ->type_name("STEPS");
  command
      ->add_option(
          "--tolerance", arguments->tolerance,
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
