#include <algorithm>
#include <filesystem>
#include <iostream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "echelon/cli/arguments.h"
#include "echelon/cli/count.h"
#include "echelon/cli/job_memory.h"
#include "echelon/cli/programs.h"
#include "echelon/cli/terminal.h"
#include "echelon/cluster/local_cluster.h"
#include "echelon/error.h"
#include "echelon/job/run_folder.h"
#include "echelon/text/format.h"
#include "echelon/text/table.h"
#include "echelon/text/units.h"
#include "echelon/timeline/metrics.h"

namespace echelon::cli {
namespace {

namespace fs = std::filesystem;

struct BenchArguments {
  HostArguments hosts;
  std::string backends = "local,gloo";
  std::string num_ranks = "2";
  std::string bytes = "4KiB,1MiB,64MiB";
  std::string ranks = "processes";
  bool json = false;
};

struct MachineArguments {
  std::string save;
  std::string num_ranks = "2";
  bool json = false;
};

fs::path chosen_path(const std::string& save) {
  const auto path = fs::absolute(save);
  std::error_code error;
  if (fs::is_directory(path, error) ||
      !fs::is_directory(path.parent_path(), error)) {
    throw ConfigError(
        "--save " + save +
        ": must be a file in a folder that exists, as in --save here.toml");
  }
  return path;
}

/// The path at which predictions of runs look for the file. Makes its folder.
fs::path default_path(int64_t ranks) {
  const auto path = cluster::saved_cluster_path(ranks);
  if (path.empty()) {
    throw ConfigError(
        "--save: neither XDG_CONFIG_HOME nor HOME is set; name a file, as in "
        "--save here.toml");
  }
  std::error_code error;
  fs::create_directories(path.parent_path(), error);
  if (error) {
    throw ConfigError(
        "--save: cannot make " + path.parent_path().string() + ": " +
        error.message() + "; name a file, as in --save here.toml");
  }
  return path;
}

int bench_machine(const MachineArguments& arguments) {
  const int64_t num_ranks =
      parse_count("-n", arguments.num_ranks, 1, kMaxRanks);
  const auto path = arguments.save.empty() ? default_path(num_ranks)
                                           : chosen_path(arguments.save);
  std::vector<std::string> command = {
      "bench", "machine", "--save", path.string()};
  if (arguments.json) command.push_back("--json");
  return launch_echelon_train(command, num_ranks, RankKind::processes);
}

int bench(const BenchArguments& arguments) {
  for (const auto& backend : split(arguments.backends, ',')) {
    check_choice("--backend", backend, {"local", "gloo", "nccl"});
  }
  std::vector<std::string> sizes;
  for (const auto& bytes : split(arguments.bytes, ',')) {
    sizes.push_back(
        std::to_string(parse_size("--bytes", bytes, 4, int64_t{1} << 36)));
  }
  check_choice("--ranks", arguments.ranks, {"processes", "threads"});
  std::vector<std::string> command = {"bench",     "collectives",
                                      "--backend", arguments.backends,
                                      "--bytes",   join(sizes, ",")};
  if (arguments.json) command.push_back("--json");
  const launch::LaunchOptions options = host_options(arguments.hosts);
  const bool threads = arguments.ranks == "threads";
  if (threads && options.num_nodes > 1) throw ConfigError(kThreadsOnHosts);
  return launch_echelon_train(
      command,
      parse_count("-n", arguments.num_ranks, 1, kMaxRanks) * options.num_nodes,
      threads ? RankKind::threads : RankKind::processes, options);
}

struct StepArguments {
  JobArguments job;
  std::string steps = "20";
  std::string warmup = "5";
  bool json = false;
};

// The job without what its steps do not need: checkpoints, evaluations, records
// of steps, and copies of the state for restarts.
Job bare(Job job, int64_t steps, const fs::path& run) {
  job.train.steps = steps;
  job.train.epochs = 0;
  job.train.run = run.string();
  job.train.log_every = steps;  // the last line has the memory of all of them
  job.train.log = {};
  job.train.eval_every = steps + 1;
  job.train.timeline_steps = 0;
  job.train.watch_seconds = 0;
  job.checkpoint = {.at_end = false, .resume = "never"};
  job.elastic.memory = MemoryCopies::off;
  return job;
}

nlohmann::ordered_json step_json(
    const Job& job, const JobFacts& facts,
    const std::vector<timeline::StepMetrics>& steps) {
  using Step = timeline::StepMetrics;
  nlohmann::ordered_json json = {
      {"configuration", job.document.name()},
      {"layout", to_string(job.layout)},
      {"ranks", job.layout.num_ranks()},
      {"parameters", facts.num_parameters},
      {"batch", job.train.batch},
      {"steps", steps.size()}};
  const auto [fastest, slowest] =
      std::ranges::minmax(steps, {}, &Step::step_seconds);
  json["step_seconds"] = *timeline::median_of(
      steps, [](const Step& step) { return step.step_seconds; });
  json["fastest_step_seconds"] = fastest.step_seconds;
  json["slowest_step_seconds"] = slowest.step_seconds;
  const auto put = [&](const char* key, const auto& figure) {
    const auto median = timeline::median_of(steps, [&](const Step& step) {
      return std::optional<double>(step.*figure)
          .value_or(std::numeric_limits<double>::quiet_NaN());
    });
    if (median) json[key] = *median;
  };
  put("data_seconds", &Step::data_seconds);
  put("forward_seconds", &Step::forward_seconds);
  put("backward_seconds", &Step::backward_seconds);
  put("communication_seconds", &Step::communication_seconds);
  put("update_seconds", &Step::update_seconds);
  put("samples_per_second", &Step::samples_per_second);
  put("tokens_per_second", &Step::tokens_per_second);
  put("mfu", &Step::mfu);
  if (steps.back().peak_memory_bytes) {
    json["peak_memory_bytes"] = *steps.back().peak_memory_bytes;
  }
  return json;
}

void print_step(const nlohmann::ordered_json& json) {
  const auto seconds = [&](const std::string& key) {
    return format_seconds(json.at(key + "_seconds").get<double>());
  };
  std::vector<std::string> parts;
  for (const char* part :
       {"data", "forward", "backward", "communication", "update"}) {
    if (!json.contains(std::string(part) + "_seconds")) continue;
    parts.push_back(format("{} {}", part, seconds(part)));
  }
  std::string rate =
      format_count(json["samples_per_second"].get<double>()) + " samples/s";
  if (json.contains("tokens_per_second")) {
    rate = format_count(json["tokens_per_second"].get<double>()) + " tokens/s";
  }
  if (json.contains("mfu")) {
    rate += ", MFU " + format_percent(json["mfu"].get<double>());
  }
  Rows rows = {
      {"layout", format(
                     "{}, {}, batch {}", json["layout"].get<std::string>(),
                     counted(json["parameters"].get<int64_t>(), "parameter"),
                     json["batch"].get<int64_t>())},
      {"step", format(
                   "{}, the median of {} ({} to {})", seconds("step"),
                   json["steps"].get<int64_t>(), seconds("fastest_step"),
                   seconds("slowest_step"))},
      {"rank 0", join(parts, ", ")},
      {"rate", rate}};
  if (json.contains("peak_memory_bytes")) {
    rows.push_back(
        {"memory",
         format(
             "{} at most, of rank 0",
             format_bytes(json["peak_memory_bytes"].get<int64_t>()))});
  }
  std::cout << aligned(rows);
}

int bench_step(const StepArguments& arguments) {
  const int64_t steps = parse_count("--steps", arguments.steps, 1, 1000000);
  const int64_t warmup = parse_count("--warmup", arguments.warmup, 0, 1000000);
  const launch::ScratchFolder scratch;
  const fs::path run = fs::path(scratch.path()) / "run";
  Job job = bare(load(arguments.job), warmup + steps, run);
  JobFacts facts = check(arguments.job, job);
  job.model.classes = facts.classes;
  count_own_parameters(job, facts);
  const std::string excess = memory_excess(job, facts);
  if (!excess.empty()) throw ConfigError(excess);
  const RunFolder made = make_run_folder(job);
  launch::LaunchOptions options;
  options.terminal = launch::Terminal::hidden;
  options.log_dir = (run / "log").string();
  const int code = launch_echelon_train(
      {"train", made.configuration, "--made"}, job.layout.num_ranks(),
      job.train.ranks, options);
  if (code != 0) return code;
  auto measured = timeline::read_metrics(run / "metrics.jsonl").steps;
  std::erase_if(
      measured, [&](const auto& step) { return step.step <= warmup; });
  if (measured.empty()) throw Error("the steps left no metrics");
  const auto json = step_json(job, facts, measured);
  if (arguments.json) {
    print_json(json, std::cout);
  } else {
    print_step(json);
  }
  return 0;
}

}  // namespace

void add_bench(Command& root) {
  Command group = root.add(
      "bench", "measure this machine",
      "echelon bench --save -n 2              reports then predict runs of 2 "
      "ranks\n"
      "echelon bench --save here.toml -n 2    a file for --cluster\n"
      "echelon bench collectives -n 2 --backend local,gloo\n"
      "echelon bench step first.toml -n 2      how fast a configuration "
      "trains");
  auto machine = std::make_shared<MachineArguments>();
  group.option_with_optional_value(
      "--save", machine->save, "[FILE]",
      "measure matmuls, memory and links of this machine, all ranks at once, "
      "and write them as a cluster file; without FILE, as the one from which "
      "reports predict runs of so many ranks here");
  group.option("-n", machine->num_ranks, "RANKS", "ranks (default: 2)");
  group.flag("--json", machine->json, "print the measurements as JSON");
  group.act([group, machine] {
    if (!group.given("--save")) {
      throw ConfigError(
          "echelon bench: --save, or what to measure, is required; `echelon "
          "bench --help` has examples");
    }
    return bench_machine(*machine);
  });

  auto [command, arguments] = group.add(
      "collectives",
      "time and bandwidth of each collective, backend and size, in the terms "
      "of nccl-tests",
      "echelon bench collectives -n 2\n"
      "echelon bench collectives -n 4 --backend local --bytes 64MiB --json",
      bench);
  command.option(
      "-n", arguments.num_ranks, "RANKS", "ranks of each host (default: 2)");
  add_host_arguments(command, arguments.hosts);
  command.option(
      "--backend", arguments.backends, "NAME,…",
      "which of local, gloo and nccl (default: local,gloo)");
  command.option(
      "--bytes", arguments.bytes, "BYTES,…",
      "bytes of each rank's tensor (default: 4KiB,1MiB,64MiB)");
  command.option(
      "--ranks", arguments.ranks, "processes|threads",
      "run each rank as a process, or as a thread of one process");
  command.flag("--json", arguments.json, "print the rows as JSON");

  auto [step, of_step] = group.add(
      "step",
      "train some steps and print how fast they were: time, samples or tokens "
      "a second, MFU and memory; nothing is kept",
      "echelon bench step first.toml -n 2\n"
      "echelon bench step first.toml --layout tp=2 --steps 50 --json",
      bench_step);
  add_job_arguments(step, of_step.job, true);
  step.option(
      "--steps", of_step.steps, "STEPS", "steps to measure (default: 20)");
  step.option(
      "--warmup", of_step.warmup, "STEPS",
      "steps before them that do not count (default: 5)");
  step.flag("--json", of_step.json, "print the figures as JSON");
}

}  // namespace echelon::cli
