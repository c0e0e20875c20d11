// The command has three parts: read_case() (simulate_case.cpp) reads the flags,
// the simulator runs, and the result is printed or, with --run, written as the
// folder of a real run, so that `echelon explain` and the report read it like
// one. The folder's config.toml is the job that would train this way: CONFIG
// with the flags' changes, or what the planner would print for a model of the
// catalogue. A note names the flags that a configuration cannot express.
#include "echelon/cli/simulate.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <utility>

#include "echelon/cli/new_folder.h"
#include "echelon/cli/terminal.h"
#include "echelon/cluster/cluster_file.h"
#include "echelon/cost/model_shape.h"
#include "echelon/explain/explain.h"
#include "echelon/planner/configuration.h"
#include "echelon/predict/configured.h"
#include "echelon/predict/counted_layers.h"
#include "echelon/predict/predict_run.h"
#include "echelon/report/report.h"
#include "echelon/simulator/effective_time.h"
#include "echelon/text/format.h"
#include "echelon/text/table.h"
#include "echelon/text/units.h"
#include "echelon/timeline/chrome_trace.h"
#include "echelon/timeline/metrics.h"

namespace echelon::cli {
namespace {

struct SimulateResult {
  simulator::SimulatedRun run;
  std::optional<simulator::EffectiveTime> weeks;  // with --hours
  double wall_seconds = 0;                        // of the simulation itself
};

// --- What is printed --------------------------------------------------------

using Json = nlohmann::ordered_json;

const cluster::Device&
fullest_device(const SimulateCase& what, const cost::StepEstimate& step) {
  const int64_t rank =
      what.strategy.layout.stride(Axis::pp) * step.memory.fullest();
  return what.cluster.node_of(rank).device;
}

bool is_text(const SimulateCase& what) {
  return what.model.transformer || what.model.seq_len > 0;
}

bool is_counted(const cost::ModelShape& model) {
  return !model.layers.empty() && model.layers.front().counted_samples > 0;
}

// The parts of a step that took time, with their names.
std::vector<std::pair<std::string, double>>
named_parts(const cost::StepParts& parts) {
  std::vector<std::pair<std::string, double>> list = {
      {"matmuls, attention", parts.matrix},
      {"memory-bound operators", parts.memory},
      {"recompute", parts.recompute}};
  for (const Axis axis : kAxes) {
    list.emplace_back(
        "waiting for " + std::string(short_name(axis)),
        parts.exposed[static_cast<size_t>(axis)]);
  }
  list.emplace_back("pipeline bubble", parts.bubble);
  list.emplace_back("optimizer", parts.optimizer);
  list.emplace_back("other", parts.other);
  std::erase_if(list, [](const auto& part) { return part.second <= 0; });
  return list;
}

Rows figures(const SimulateCase& what, const SimulateResult& result) {
  const cost::StepEstimate& step = result.run.step;
  const double ranks = static_cast<double>(what.strategy.layout.num_ranks());
  const double each = step.tokens_per_second / ranks;
  const cluster::Device& device = fullest_device(what, step);
  const double usable = cost::usable_bytes(device);
  const double peak = step.memory.peak_bytes();
  Rows rows = {
      {"step", format_seconds(step.step_seconds)},
      {is_text(what) ? "tokens/s" : "samples/s",
       format(
           "{}, {} a device", format_count(step.tokens_per_second),
           each < 100 ? format_number(each) : format_count(each))},
      {"MFU",
       format(
           "{} of the {} peak", format_percent(step.model_flops_utilisation),
           cluster::to_string(what.strategy.precision))},
  };
  if (!what.memory_is_planned) {
    rows.push_back(
        {"memory",
         format(
             "{} of the fullest device's {}{}", format_bytes(peak),
             format_bytes(usable), step.fits ? "" : ": does not fit")});
  }
  if (result.run.step_seconds.size() > 1) {
    const auto [least, most] = std::ranges::minmax(result.run.step_seconds);
    rows.push_back(
        {"steps",
         format(
             "{}, from {} to {}", format_count(result.run.step_seconds.size()),
             format_seconds(least), format_seconds(most))});
  }
  return rows;
}

// What to do about a job that does not fit.
std::string remedy_text(const std::optional<NearestFit>& nearest) {
  if (!nearest) {
    return "Neither smaller microbatches, fsdp, recompute nor sequence "
           "parallelism makes it fit: take more devices, more tp or pp, or let "
           "`echelon plan` search.";
  }
  return format(
      "It fits with {}: {}, about {} a step.", nearest->flags,
      format_bytes(nearest->step.memory.peak_bytes()),
      format_seconds(nearest->step.step_seconds));
}

void print_weeks(
    const SimulateCase& what, const simulator::EffectiveTime& weeks) {
  std::cout << format(
      "\n{:g} hours of it, with failures\n", what.failures.hours);
  const bool fails = weeks.hours_between_failures > 0;
  const Rows rows = {
      {"  steps that count", format_percent(weeks.share),
       "by formula " + format_percent(weeks.expected_share)},
      {"  saving", format_percent(weeks.saving),
       fails ? "a checkpoint after each " +
                   format_seconds(weeks.interval_seconds) + " of training"
             : ""},
      {"  repeated", format_percent(weeks.lost), ""},
      {"  recovering", format_percent(weeks.recovering),
       fails ? format(
                   "{}, one each {} h on average",
                   counted(weeks.failures, "failure"),
                   format_number(weeks.hours_between_failures))
             : "no failures; see --mean-hours-between-failures"}};
  std::cout << aligned(rows);
}

void print_simulation_text(
    const SimulateCase& what, const SimulateResult& result) {
  const cost::StepEstimate& step = result.run.step;
  const int64_t ranks = what.strategy.layout.num_ranks();
  std::cout << format(
      "{} on {}, {} of {}\n{}\n\n{}", what.model.name, what.cluster.name,
      format_count(ranks), counted(what.cluster.num_devices(), "device"),
      cost::to_string(what.strategy), aligned(figures(what, result)));
  if (!step.fits && !what.memory_is_planned) {
    std::cout << "\n" << prose(remedy_text(nearest_fit(what)), 0, 80) << "\n";
  }
  std::cout << "\ntime of the slowest rank's step\n";
  Rows rows;
  for (const auto& [name, seconds] : named_parts(step.parts)) {
    rows.push_back(
        {"  " + name, format_seconds(seconds),
         format_percent(seconds / step.parts.total())});
  }
  std::cout << aligned(rows);
  if (is_counted(what.model)) {
    print_operators(what, step);
    print_beside_formulas(what, step);
  }
  if (result.weeks) print_weeks(what, *result.weeks);
  std::string simulated = ranks == 1 ? "the one rank" : "each rank";
  if (result.run.simulated_ranks < ranks) {
    simulated = format(
        "{} of {} ranks, the others do the same",
        format_count(result.run.simulated_ranks), format_count(ranks));
  }
  std::cout << format(
      "\nsimulated {}; {} events in {}\n", simulated,
      format_count(result.run.events), format_seconds(result.wall_seconds));
}

Json to_json(const SimulateCase& what, const SimulateResult& result) {
  const cost::StepEstimate& step = result.run.step;
  Json json;
  json["model"] = what.model.name;
  json["cluster"] = what.cluster.name;
  json["strategy"] = cost::to_string(what.strategy);
  json["layout"] = to_string(what.strategy.layout);
  json["step_seconds"] = step.step_seconds;
  json["steps"] = result.run.step_seconds;
  json[is_text(what) ? "tokens_per_second" : "samples_per_second"] =
      step.tokens_per_second;
  json["model_flops_utilisation"] = step.model_flops_utilisation;
  if (!what.memory_is_planned) {
    json["fits"] = step.fits;
    if (!step.fits) {
      const auto nearest = nearest_fit(what);
      json["fits_with"] = nearest ? Json(nearest->flags) : Json();
    }
    json["memory_bytes"] = step.memory.peak_bytes();
    json["usable_bytes"] = cost::usable_bytes(fullest_device(what, step));
  }
  Json parts;
  parts["matrix"] = step.parts.matrix;
  parts["memory"] = step.parts.memory;
  parts["recompute"] = step.parts.recompute;
  for (const Axis axis : kAxes) {
    const auto at = static_cast<size_t>(axis);
    parts["exposed"][std::string(short_name(axis))] = step.parts.exposed[at];
    json["communication"][std::string(short_name(axis))] =
        step.communication[at];
  }
  parts["bubble"] = step.parts.bubble;
  parts["optimizer"] = step.parts.optimizer;
  parts["other"] = step.parts.other;
  json["parts"] = parts;
  if (result.weeks) {
    const simulator::EffectiveTime& weeks = *result.weeks;
    json["effective_time"] = {
        {"hours", what.failures.hours},
        {"share", weeks.share},
        {"expected_share", weeks.expected_share},
        {"saving", weeks.saving},
        {"lost", weeks.lost},
        {"recovering", weeks.recovering},
        {"failures", weeks.failures},
        {"interval_seconds", weeks.interval_seconds},
        {"hours_between_failures", weeks.hours_between_failures}};
  }
  if (is_counted(what.model)) json["counted"] = operators_json(what);
  json["simulated_ranks"] = result.run.simulated_ranks;
  json["events"] = result.run.events;
  json["wall_seconds"] = result.wall_seconds;
  return json;
}

// --- The folder of a run ----------------------------------------------------

std::string set(const char* key, int64_t value) {
  return format("{}={}", key, value);
}

std::string set(const char* key, const std::string& value) {
  return format("{}=\"{}\"", key, value);
}

// The settings of the flags that were given.
std::vector<std::string> settings_of(
    const SimulateArguments& arguments, const cost::Strategy& strategy) {
  const bool passes = !arguments.batch.empty() || !arguments.microbatch.empty();
  const bool compute = strategy.precision == cluster::Precision::tf32 ||
                       strategy.precision == cluster::Precision::bf16 ||
                       strategy.precision == cluster::Precision::fp16;
  const std::pair<bool, std::string> all[] = {
      {passes, set("train.batch", strategy.global_batch)},
      {passes,
       set(strategy.layout.pp > 1 ? "layout.microbatches" : "train.accumulate",
           strategy.num_microbatches())},
      {!arguments.seq_len.empty(), set("data.sequence", strategy.seq_len)},
      {!arguments.schedule.empty(),
       set("layout.schedule", to_string(strategy.schedule))},
      {!arguments.stages_per_rank.empty(),
       set("layout.stages_per_rank", strategy.stages_per_rank)},
      {!arguments.recompute.empty(),
       set("memory.recompute", cost::to_string(strategy.recompute))},
      {!arguments.zero.empty(), set("shard.stage", strategy.zero_stage)},
      {compute, set("precision.compute",
                    std::string(cluster::to_string(strategy.precision)))},
      {arguments.sequence_parallel, "layout.sequence_parallel=true"}};
  std::vector<std::string> settings;
  for (const auto& [given, setting] : all) {
    if (given) settings.push_back(setting);
  }
  return settings;
}

Job planned_job(const SimulateCase& what) {
  const cost::Strategy& strategy = what.strategy;
  const planner::PlanRequest request{
      .model = what.model,
      .cluster = what.cluster,
      .global_batch = strategy.global_batch,
      .seq_len = strategy.seq_len,
      .precision = strategy.precision,
      .framework = strategy.framework};
  const planner::Plan plan{.strategy = strategy};
  Job job =
      parse_job(planner::to_configuration(plan, request), "what was simulated");
  job.optimizer.name = strategy.optimizer;
  job.optimizer.momentum = strategy.momentum;
  job.precision.reduce = strategy.reduce;
  job.train.steps = what.options.steps;
  if (job.data.name != DataKind::images) return job;
  job.data.name = DataKind::dummy;
  job.data.shape = {3, job.data.image_size, job.data.image_size};
  job.data.classes = what.model.layers.back().columns;
  job.data.holdout = 0;
  job.data.samples = std::max(job.data.samples, 2 * strategy.global_batch);
  return job;
}

// The flags that a configuration cannot express.
std::string missing_settings(const cost::Strategy& strategy, const Job& job) {
  std::vector<std::string> flags;
  if (strategy.framework != "echelon")
    flags.push_back("--stack " + strategy.framework);
  if (predict::configured_strategy(job).precision != strategy.precision) {
    flags.push_back(
        format("--precision {}", cluster::to_string(strategy.precision)));
  }
  if (flags.empty()) return "";
  return "config.toml does not say " + join(flags, ", ") +
         ", which echelon train does not have";
}

// Nothing is trained, so the metrics are times alone.
std::vector<timeline::StepMetrics>
metrics_of(const SimulateCase& what, const simulator::SimulatedRun& run) {
  std::vector<timeline::StepMetrics> list;
  const double samples = static_cast<double>(what.strategy.global_batch);
  const int64_t tokens =
      what.strategy.seq_len > 0 ? what.strategy.seq_len : what.model.seq_len;
  for (const double seconds : run.step_seconds) {
    timeline::StepMetrics step;
    step.simulated = true;
    step.step = static_cast<int64_t>(list.size()) + 1;
    step.step_seconds = seconds;
    step.samples_per_second = samples / seconds;
    if (what.model.transformer) {
      step.tokens_per_second = samples * static_cast<double>(tokens) / seconds;
    }
    list.push_back(step);
  }
  return list;
}

std::vector<std::pair<std::string, std::string>>
facts_of(const SimulateCase& what, const simulator::SimulatedRun& run) {
  const cost::Strategy& strategy = what.strategy;
  return {
      {"Simulated", "nothing was trained; times are predictions"},
      {"Model", what.model.name},
      {"Parameters", format_count(what.model.num_parameters())},
      {"Cluster", what.cluster.name},
      {"Strategy", cost::to_string(strategy)},
      {"Ranks", format_count(strategy.layout.num_ranks()) + "; some are shown"},
      {"Global batch", format_count(strategy.global_batch)},
      {"Precision", std::string(cluster::to_string(strategy.precision))},
      {"Software", strategy.framework},
      {"Memory", format_bytes(run.step.memory.peak_bytes()) +
                     (run.step.fits ? " of the fullest device, fits"
                                    : " of the fullest device: does not fit")},
      {"MFU", format_percent(run.step.model_flops_utilisation)}};
}

// "25.3 GiB" and what it is of, as the terminal prints it.
std::vector<report::Tile>
tiles_of(const SimulateCase& what, const cost::StepEstimate& step) {
  const std::string peak = format_bytes(step.memory.peak_bytes());
  const std::string usable =
      format_bytes(cost::usable_bytes(fullest_device(what, step)));
  const size_t space = peak.find(' ');
  return {
      {.name = "MFU",
       .value = format_percent(step.model_flops_utilisation),
       .sub = format(
           "of the {} peak", cluster::to_string(what.strategy.precision))},
      {.name = "Memory",
       .value = peak.substr(0, space),
       .sub = format("of {}{}", usable, step.fits ? "" : ": does not fit"),
       .unit = peak.substr(space + 1)}};
}

struct SimulatedConfiguration {
  std::string text;     // config.toml; empty: `echelon train` has no such model
  std::string missing;  // settings that it lacks, and why; empty: none
};

/// CONFIG with the changes of the flags. For a model of the catalogue it is
/// what the planner would print, without data to train on (images: random
/// ones). Throws ConfigError where `echelon train` does not accept a flag.
SimulatedConfiguration
configuration_of(const SimulateArguments& arguments, const SimulateCase& what) {
  if (arguments.config.empty() && !planner::is_trained_here(what.model)) {
    return {
        .missing =
            "there is no config.toml: echelon train has no " + what.model.name};
  }
  const Job job =
      arguments.config.empty()
          ? planned_job(what)
          : load_job(
                arguments.config, {.set = settings_of(arguments, what.strategy),
                                   .layout = arguments.layout});
  return {to_toml(job), missing_settings(what.strategy, job)};
}

/// Writes timeline.json, metrics.jsonl, report.html, cluster.toml and, where
/// they are known, config.toml and layers.json into the new folder `path`.
void write_simulated_run(
    const SimulateCase& what, const SimulateResult& result,
    const SimulatedConfiguration& configuration, const std::string& path) {
  const simulator::SimulatedRun& run = result.run;
  NewFolder folder(path);
  report::ReportInput input;
  input.title = what.model.name + " on " + what.cluster.name + ", simulated";
  input.facts = facts_of(what, run);
  input.metrics = metrics_of(what, run);
  input.timeline = run.timeline;
  input.prediction = predict::prediction_of(run, what.strategy, what.cluster);
  input.total_seconds =
      std::accumulate(run.step_seconds.begin(), run.step_seconds.end(), 0.0);
  {
    timeline::MetricsWriter metrics(folder.path() / "metrics.jsonl");
    for (const auto& step : input.metrics) metrics.append(step);
    metrics.flush();  // reports errors
  }
  if (!configuration.text.empty()) {
    folder.write("config.toml", configuration.text);
  }
  if (is_counted(what.model)) {
    folder.write(
        predict::kCountedLayersFile, cost::counted_model_json(what.model));
  }
  folder.write("cluster.toml", cluster::to_toml(what.cluster));
  timeline::write_chrome_trace(folder.path() / "timeline.json", run.timeline);
  input.tiles = tiles_of(what, run.step);
  // explain_run() reads the files that are written above.
  input.findings = explain::findings_for_page(
      explain::explain_run(folder.path(), {.simulation_seconds = 2}));
  report::write_report(folder.path() / "report.html", input);
  folder.move_into_place();
}

// --- The command ------------------------------------------------------------

SimulateResult simulate_case(const SimulateCase& what) {
  const auto begin = std::chrono::steady_clock::now();
  SimulateResult result;
  result.run = simulator::simulate(
      what.model, what.strategy, what.cluster, what.options);
  if (what.with_failures) {
    // Ranks fill the nodes in order, so the last rank's node tells how many
    // nodes can fail.
    const int64_t last = what.strategy.layout.num_ranks() - 1;
    result.weeks = simulator::effective_time(
        what.cluster, what.cluster.node_index(last) + 1,
        result.run.step.step_seconds, what.failures);
  }
  result.wall_seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin)
          .count();
  return result;
}

}  // namespace

Json simulated_json(const SimulateArguments& arguments) {
  const SimulateCase what = read_case(arguments);
  return to_json(what, simulate_case(what));
}

int run_simulate(const SimulateArguments& arguments) {
  const SimulateCase what = read_case(arguments);
  const SimulateResult result = simulate_case(what);
  SimulatedConfiguration configuration;
  if (!arguments.run.empty()) {
    configuration = configuration_of(arguments, what);
    write_simulated_run(what, result, configuration, arguments.run);
  }
  if (arguments.json) {
    print_json(to_json(what, result), std::cout);
    return 0;
  }
  print_simulation_text(what, result);
  if (!arguments.run.empty()) {
    std::cout << "report: " << arguments.run << "/report.html\n";
    if (!configuration.missing.empty()) {
      std::cout << "note: " << configuration.missing << "\n";
    }
  }
  return 0;
}

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
      "count the configuration's layers now, operator by operator, as the "
      "cluster's devices would run them, instead of using formulas (needs "
      "echelon-train)");
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
