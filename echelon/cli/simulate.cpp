#include <CLI/CLI.hpp>
#include <chrono>
#include <iostream>
#include <memory>
#include <string>

#include "echelon/cli/command_line.h"
#include "echelon/cli/simulate_case.h"
#include "echelon/cli/simulate_config.h"
#include "echelon/cli/simulate_print.h"
#include "echelon/error.h"

namespace echelon::cli {
namespace {

int run_simulate(const SimulateArguments& arguments) {
  const SimulateCase what = read_case(arguments);
  const auto begin = std::chrono::steady_clock::now();
  SimulateResult result;
  result.run = simulate(what.model, what.strategy, what.cluster, what.options);
  if (what.with_failures) {
    const int64_t last = what.strategy.layout.num_ranks() - 1;
    result.weeks = effective_time(
        what.cluster, what.cluster.node_index(last) + 1,
        result.run.step.step_seconds, what.failures);
  }
  result.wall_seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin)
          .count();
  SimulatedConfiguration configuration;
  if (!arguments.run.empty()) {
    configuration = configuration_of(arguments, what);
    write_simulated_run(what, result, configuration, arguments.run);
  }
  if (arguments.json) {
    print_simulation_json(what, result, std::cout);
    return 0;
  }
  print_simulation_text(what, result, std::cout);
  if (!arguments.run.empty()) {
    std::cout << "report: " << arguments.run << "/report.html\n";
    if (!configuration.missing.empty()) {
      std::cout << "note: " << configuration.missing << "\n";
    }
  }
  return 0;
}

}  // namespace

void add_simulate(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "simulate",
      "say how long a step takes on devices that are not here, where the time "
      "goes "
      "and whether it fits");
  command->footer(
      "echelon simulate --model gpt2 --cluster a100-80gb:8 --layout dp=8 "
      "--batch 64\n"
      "echelon simulate first.toml --cluster h100-sxm:1x8 --layout fsdp=8\n"
      "echelon simulate first.toml --cluster h100-sxm:1x8 --run "
      "runs/simulated\n"
      "echelon simulate first.toml --cluster h100-sxm:8x8 --stragglers 1 "
      "--hours 168");
  auto arguments = std::make_shared<SimulateArguments>();
  command
      ->add_option(
          "config", arguments->config,
          "a configuration of echelon train, in place of --model, --batch and "
          "what "
          "it says of the strategy")
      ->type_name("CONFIG.toml");
  const auto option = [&](const char* name, std::string& value,
                          const char* type, const char* help) {
    command->add_option(name, value, help)->type_name(type);
  };
  add_job_flags(*command, *arguments);
  option(
      "--layers", arguments->layers, "FILE",
      "the configuration's layers as echelon-train count CONFIG printed them, "
      "in "
      "place of formulas");
  command->add_flag(
      "--count", arguments->count,
      "count the configuration's layers now, operator by operator, in place of "
      "formulas: closer on a processor (needs echelon-train)");
  option(
      "--layout", arguments->layout, "LAYOUT",
      "degrees of the axes: dp=2,fsdp=4,tp=8,pp=4,cp=2,ep=1 (one rank); their "
      "order, outermost first: order=pp:dp:fsdp:cp:tp (dp, fsdp, pp, cp, ep, "
      "tp)");
  option(
      "--microbatch", arguments->microbatch, "SAMPLES",
      "of a rank in one pass (1)");
  option(
      "--schedule", arguments->schedule, "KIND",
      "of the pipeline, as echelon schedule has them (1f1b)");
  option(
      "--stages-per-rank", arguments->stages_per_rank, "NUMBER",
      "of the pipeline (what the schedule takes)");
  option(
      "--recompute", arguments->recompute, "none|selective|all",
      "what backward computes again (none)");
  option(
      "--zero", arguments->zero, "1|2|3",
      "what fsdp cuts: optimizer state, gradients too, parameters too (3)");
  command->add_flag(
      "--sequence-parallel", arguments->sequence_parallel,
      "ranks of tp share out what lies between their layers");
  option("--steps", arguments->steps, "NUMBER", "how many to simulate (1)");
  option(
      "--jitter", arguments->jitter, "SHARE",
      "of each operation's time, at random, as 0.05 (0)");
  option(
      "--stragglers", arguments->stragglers, "NUMBER",
      "ranks that are slower, drawn by --seed (0)");
  option(
      "--straggler-factor", arguments->straggler_factor, "FACTOR",
      "how much longer they take (1.2)");
  option(
      "--seed", arguments->seed, "NUMBER",
      "of jitter, stragglers, failures (0)");
  option(
      "--hours", arguments->hours, "HOURS",
      "simulate so long a run with failures, checkpoints and restarts");
  option(
      "--mean-hours-between-failures", arguments->mean_hours_between_failures,
      "HOURS", "of one node (the cluster file's; else none fails)");
  option(
      "--checkpoint-seconds", arguments->checkpoint_seconds, "SECONDS",
      "that saving one stops training (30)");
  option(
      "--checkpoint-interval-seconds", arguments->checkpoint_interval_seconds,
      "SECONDS", "of training between two (the best)");
  option(
      "--recovery-seconds", arguments->recovery_seconds, "SECONDS",
      "from a failure to the next step (300)");
  option(
      "--run", arguments->run, "FOLDER",
      "write there what a run writes: report.html, timeline.json, config.toml, "
      "…");
  command->add_flag("--json", arguments->json, "print JSON");
  command->callback([&action, arguments] {
    action = [arguments] { return run_simulate(*arguments); };
  });
}

}  // namespace echelon::cli
