#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <iostream>
#include <memory>

#include "echelon/checkpoint/files/folder.h"
#include "echelon/cli/arguments.h"
#include "echelon/cli/capture.h"
#include "echelon/cli/command_line.h"
#include "echelon/cli/help.h"
#include "echelon/cli/scratch_config.h"
#include "echelon/cli/terminal.h"
#include "echelon/error.h"
#include "echelon/job/run_folder.h"
#include "echelon/launch/launch.h"

namespace echelon::cli {
namespace {

struct TrainArguments {
  JobArguments job;
  bool check = false;
  bool dry_run = false;
  bool json = false;
};

void print_facts(const Job& job, const JobFacts& facts) {
  std::cout << job.document.name() << ": fine\n"
            << "  model   " << job.model.name << ", " << facts.num_parameters
            << " parameters, " << facts.classes << " classes\n"
            << "  data    " << facts.data.describe << "; "
            << facts.data.num_train << " to train on, "
            << facts.data.num_holdout << " held out\n"
            << "  layout  " << to_string(job.layout) << ": "
            << job.layout.num_ranks()
            << (job.layout.num_ranks() == 1 ? " rank" : " ranks") << "\n"
            << "  run     " << facts.steps << " steps of " << job.train.batch
            << " samples, into " << job.train.run << "\n";
}

// Layers are counted by echelon-train, which knows their operators.
int plan(const TrainArguments& arguments) {
  Job job = load(arguments.job);
  if (job.train.steps == 0 && job.train.epochs == 0) job.train.steps = 1;
  const JobFacts facts = check(arguments.job, job);
  job.model.classes = facts.classes;
  const ScratchConfig config(job);
  std::vector<std::string> command = {
      find_echelon_train(), "plan", config.path()};
  if (arguments.json) command.push_back("--json");
  if (has_colours(1)) command.push_back("--colours");
  command.insert(
      command.end(), {"--columns", std::to_string(std::min<size_t>(
                                       terminal_columns(80), 100))});
  const Captured counted = capture(command, std::chrono::minutes(10));
  std::cout << counted.out << std::flush;
  std::cerr << counted.err;
  if (counted.timed_out) {
    throw Error("--dry-run: the layers were not counted within 10 minutes");
  }
  return counted.exit_code;
}

// Of a run that is taken up again.
bool is_done(const Job& job, const JobFacts& facts) {
  const auto latest =
      latest_checkpoint(std::filesystem::path(job.train.run) / "checkpoints");
  if (!latest || latest->step < facts.steps) return false;
  std::cout << job.train.run << " has " << latest->step << " of " << facts.steps
            << " steps; more of them (train.steps, train.epochs) go on from "
               "there, --overwrite begins anew\n";
  return true;
}

int train(const TrainArguments& arguments) {
  if (arguments.dry_run) return plan(arguments);
  if (arguments.json) {
    throw ConfigError(
        "echelon train: --json prints what --dry-run finds; give both, or look "
        "into metrics.jsonl of the run");
  }
  Job job = load(arguments.job);
  const JobFacts facts = check(arguments.job, job);
  job.model.classes = facts.classes;
  const bool goes_on = check_run_folder(job);
  if (arguments.check) {
    print_facts(job, facts);
    return 0;
  }
  if (goes_on && is_done(job, facts)) return 0;
  const std::string program = find_echelon_train();
  const std::string config = make_run_folder(job);

  launch::LaunchOptions options;
  options.command = {program, "train", config};
  options.num_ranks = static_cast<int>(job.layout.num_ranks());
  if (job.train.ranks == "threads") {
    options.command.insert(
        options.command.end(),
        {"--threads", std::to_string(options.num_ranks)});
    options.num_ranks = 1;
  }
  options.log_dir = (std::filesystem::path(job.train.run) / "log").string();
  options.terminal = launch::Terminal::rank_zero;
  options.listen_early = true;
  return launch::run(options);
}

}  // namespace

void add_train(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "train", "train a model on this machine, on as many ranks as asked");
  command->footer(
      "echelon train first.toml -n 2\n"
      "echelon train first.toml -n 2 --set train.steps=100 --overwrite\n"
      "echelon train first.toml --layout dp=4 --ranks threads\n"
      "echelon train first.toml --resume runs/other   from its newest "
      "checkpoint\n"
      "echelon train first.toml --check        check all of it, start nothing\n"
      "echelon train first.toml --dry-run      what each rank would hold and "
      "send");
  auto arguments = std::make_shared<TrainArguments>();
  add_job_arguments(*command, arguments->job, true);
  command->add_flag(
      "--overwrite", arguments->job.overrides.overwrite,
      "replace the run folder if it exists");
  command->add_option(
      "--resume", arguments->job.overrides.resume,
      "begin with another run's folder or a checkpoint; a run that has "
      "checkpoints "
      "goes on from its own (auto), or never");
  command->add_flag(
      "--check", arguments->check,
      "check the configuration and what it names; start nothing");
  command->add_flag(
      "--dry-run", arguments->dry_run,
      "print each rank's peak of memory by kind, and a step's collectives; "
      "start nothing");
  command->add_flag(
      "--json", arguments->json, "print what --dry-run finds as JSON");
  command->callback([&action, arguments] {
    action = [arguments] { return train(*arguments); };
  });
}

}  // namespace echelon::cli
