#include "echelon/cli/arguments.h"
#include "echelon/cli/programs.h"
#include "echelon/error.h"

namespace echelon::cli {
namespace {

struct VerifyArguments {
  JobArguments job;
  HostArguments hosts;
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

// Verifies one layout, with `more` arguments for echelon-train.
int start(
    const Job& job, const VerifyArguments& arguments,
    launch::LaunchOptions options, const std::vector<std::string>& more) {
  check_hosts(job, options.num_nodes);
  const ScratchConfig config(job);
  std::vector<std::string> command = {"verify", config.path()};
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
  // This exit code is the answer that they differ.
  options.answer_code = static_cast<int>(ExitCode::failure);
  return launch_echelon_train(
      command, job.layout.num_ranks(), job.train.ranks, options);
}

int verify(const VerifyArguments& given) {
  VerifyArguments arguments = given;
  const launch::LaunchOptions options = host_options(arguments.hosts);
  arguments.job.num_hosts = options.num_nodes;
  if (arguments.resume != !arguments.then.empty()) {
    throw ConfigError(
        "echelon verify: --resume saves with --layout and resumes with --then; "
        "give both, as in --resume --layout dp=2 --then tp=2");
  }
  const Job job = checked(arguments.job);
  if (!arguments.resume) return start(job, arguments, options, {});
  if (options.num_nodes > 1) {
    throw ConfigError(
        "echelon verify: --resume saves to a folder of this host alone; leave "
        "it out with --nnodes");
  }
  JobArguments second = arguments.job;
  second.overrides.layout = arguments.then;
  second.overrides.num_ranks = 0;
  const Job then = checked(second);
  const launch::ScratchFolder folder;
  const int failed = start(job, arguments, options, {"--save", folder.path()});
  return failed != 0
             ? failed
             : start(then, arguments, options, {"--resume", folder.path()});
}

}  // namespace

void add_verify(Command& root) {
  auto [command, arguments] = root.add(
      "verify",
      "prove that a layout computes the same as one rank: losses, every "
      "gradient and every parameter, in float64",
      "echelon verify first.toml -n 4\n"
      "echelon verify first.toml --layout dp=2 --steps 5 --json\n"
      "echelon verify first.toml --resume --layout dp=2 --then tp=2\n"
      "echelon verify first.toml -n 8 --nnodes 2 --node-rank 0 --master-addr "
      "10.0.0.1",
      verify);
  command.flag(
      "--resume", arguments.resume,
      "save after the steps, resume with --then, and compare the steps after "
      "that with those of one rank that never stopped");
  command.option(
      "--then", arguments.then, "LAYOUT", "--resume: the second layout");
  add_job_arguments(command, arguments.job, true);
  add_host_arguments(command, arguments.hosts);
  command.option(
      "--steps", arguments.steps, "STEPS", "number of steps to compare");
  command.option(
      "--tolerance", arguments.tolerance, "NUMBER",
      "largest relative difference (default: 1e-10)");
  command.flag("--json", arguments.json, "print the result as JSON");
  // For tests of verify itself: doubles one gradient.
  command.hidden_flag("--plant-error", arguments.plant_error);
}

}  // namespace echelon::cli
