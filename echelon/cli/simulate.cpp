#include "echelon/cli/simulate.h"

#include <chrono>
#include <iostream>
#include <string>

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

void add_simulate(Command& root) {
  auto [command, arguments] = root.add(
      "simulate",
      "predict the time and the memory of a step on devices that are not here, "
      "and where the time goes",
      "echelon simulate --model gpt2 --cluster a100-80gb:8 --layout dp=8 "
      "--batch 64\n"
      "echelon simulate first.toml --cluster h100-sxm:1x8 --layout fsdp=8\n"
      "echelon simulate first.toml --cluster h100-sxm:1x8 --run "
      "runs/simulated\n"
      "echelon simulate first.toml --cluster h100-sxm:8x8 --stragglers 1 "
      "--hours 168",
      run_simulate);
  command.optional_positional(
      "CONFIG.toml", arguments.config,
      "a configuration of echelon train, instead of --model and --batch");
  add_job_flags(command, arguments);
  command.option(
      "--layers", arguments.layers, "FILE",
      "layers as `echelon-train count CONFIG` counted them, instead of "
      "formulas");
  command.flag(
      "--count", arguments.count,
      "count the configuration's layers now, operator by operator, instead of "
      "using formulas: more accurate on CPUs (needs echelon-train)");
  command.option(
      "--layout", arguments.layout, "LAYOUT",
      "degrees of the axes: dp=2,fsdp=4,tp=8,pp=4,cp=2,ep=1 (default: one "
      "rank); their order, outermost first: order=pp:dp:fsdp:cp:tp (default: "
      "dp, fsdp, pp, cp, ep, tp)");
  command.option(
      "--microbatch", arguments.microbatch, "SAMPLES",
      "samples of a rank's microbatch (default: 1)");
  command.option(
      "--schedule", arguments.schedule, "KIND",
      "pipeline schedule, as in echelon schedule (default: 1f1b)");
  command.option(
      "--stages-per-rank", arguments.stages_per_rank, "NUMBER",
      "pipeline stages of a rank (default: the schedule's)");
  command.option(
      "--recompute", arguments.recompute, "none|selective|all",
      "activations that backward recomputes (default: none)");
  command.option(
      "--zero", arguments.zero, "1|2|3",
      "what fsdp shards: 1 optimizer state, 2 also gradients, 3 also "
      "parameters (default: 3)");
  command.flag(
      "--sequence-parallel", arguments.sequence_parallel,
      "shard the activations between tp layers along the sequence");
  command.option(
      "--steps", arguments.steps, "NUMBER", "steps to simulate (default: 1)");
  command.option(
      "--jitter", arguments.jitter, "SHARE",
      "random variation of each operator's time, as 0.05 (default: 0)");
  command.option(
      "--stragglers", arguments.stragglers, "NUMBER",
      "number of slower ranks, chosen by --seed (default: 0)");
  command.option(
      "--straggler-factor", arguments.straggler_factor, "FACTOR",
      "slowdown of stragglers (default: 1.2)");
  command.option(
      "--seed", arguments.seed, "NUMBER",
      "seed of jitter, stragglers and failures (default: 0)");
  command.option(
      "--hours", arguments.hours, "HOURS",
      "simulate a run of this length with failures, checkpoints and restarts");
  command.option(
      "--mean-hours-between-failures", arguments.mean_hours_between_failures,
      "HOURS", "of one node (default: the cluster file's, or no failures)");
  command.option(
      "--checkpoint-seconds", arguments.checkpoint_seconds, "SECONDS",
      "time that training stops for a checkpoint (default: 30)");
  command.option(
      "--checkpoint-interval-seconds", arguments.checkpoint_interval_seconds,
      "SECONDS", "training between checkpoints (default: the best)");
  command.option(
      "--recovery-seconds", arguments.recovery_seconds, "SECONDS",
      "time from a failure to the next step (default: 300)");
  command.option(
      "--run", arguments.run, "FOLDER",
      "write the files of a run: report.html, timeline.json, config.toml, …");
  command.flag("--json", arguments.json, "print JSON");
}

}  // namespace echelon::cli
