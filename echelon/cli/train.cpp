#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "echelon/checkpoint/files/folder.h"
#include "echelon/checkpoint/format/hashes.h"
#include "echelon/checkpoint/memory/memory_server.h"
#include "echelon/checkpoint/memory/memory_slots.h"
#include "echelon/checkpoint/remote/remote_checkpoints.h"
#include "echelon/cli/arguments.h"
#include "echelon/cli/count.h"
#include "echelon/cli/job_hosts.h"
#include "echelon/cli/job_memory.h"
#include "echelon/cli/programs.h"
#include "echelon/cli/replans.h"
#include "echelon/cli/simulate.h"
#include "echelon/cli/start_on_hosts.h"
#include "echelon/cli/terminal.h"
#include "echelon/cluster/catalogue.h"
#include "echelon/cluster/cuda_driver.h"
#include "echelon/cluster/host.h"
#include "echelon/error.h"
#include "echelon/job/compute_dtype.h"
#include "echelon/job/run_folder.h"
#include "echelon/report/report.h"
#include "echelon/text/build_info.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"
#include "echelon/text/units.h"
#include "echelon/watch/run_report.h"

namespace echelon::cli {
namespace {

struct TrainArguments {
  JobArguments job;
  HostArguments hosts;
  bool check = false;
  bool dry_run = false;
  std::string on;  // the cluster of a dry run
  bool json = false;
  std::string max_restarts;
  std::string metrics_address, metrics_file;
};

void print_facts(const Job& job, const JobFacts& facts) {
  std::cout << format(
      "{}: fine\n"
      "  model   {}\n"
      "  data    {}\n"
      "  layout  {}: {}\n"
      "  run     {} of {}, into {}\n",
      job.document.name(),
      job.model.name == kOwnModel
          ? format("own, of {}", job.model.library) +
                (facts.num_parameters == 0
                     ? ""
                     : ", " + counted(facts.num_parameters, "parameter"))
          : format(
                "{}, {}, {}", job.model.name,
                counted(facts.num_parameters, "parameter"),
                counted(facts.classes, "class")),
      job.data.name == DataKind::own
          ? facts.data.describe
          : format(
                "{}; {} to train on, {} held out", facts.data.describe,
                format_count(facts.data.num_train),
                format_count(facts.data.num_holdout)),
      to_string(job.layout), counted(job.layout.num_ranks(), "rank"),
      facts.steps > 0 ? counted(facts.steps, "step")
                      : counted(job.train.epochs, "epoch"),
      counted(job.train.batch, "sample"), job.train.run);
}

// Where the ranks keep copies of their state for a restart; null: nowhere.
std::unique_ptr<MemorySlots> memory_of_restarts(
    const Job& job, const JobFacts& facts, launch::LaunchOptions& options) {
  if (options.max_restarts == 0 || !may_copy(job, facts, options.num_nodes)) {
    return nullptr;
  }
  try {
    auto slots = std::make_unique<MemorySlots>(
        static_cast<int>(job.layout.num_ranks() / options.num_nodes));
    options.environment.emplace_back("ECHELON_MEMORY", slots->path());
    return slots;
  } catch (const ConfigError& error) {
    std::cerr << "warning: no copies of the state in memory: " << error.what()
              << "\n";
    return nullptr;
  }
}

// Without the server, a host that is lost takes its copies along.
pid_t serve(
    MemorySlots& slots, const std::string& address,
    const authentication::Key& key, std::optional<MemoryServer>& server) {
  try {
    server.reset();
    return server.emplace(slots, address, key).pid();
  } catch (const ConfigError& error) {
    std::cerr << "warning: no copies of the state in memory: " << error.what()
              << "\n";
    return -1;
  }
}

launch::HostNeeds
needs_of(const Job& job, const JobFacts& facts, int num_nodes) {
  launch::HostNeeds needs{
      .folder = job.train.run, .gpus = job.comm.device != DeviceKind::cpu};
  if (saves(job.checkpoint)) needs.disk_bytes = bytes_of_state(job, facts);
  if (!needs.gpus || !cluster::find_gpu_signs().device_file) {
    needs.memory_bytes = bytes_of_training(job, facts) *
                         static_cast<double>(job.layout.dp_replicate) /
                         num_nodes;
  }
  return needs;
}

// Throws when the plan says that ranks will run out of memory.
void check_memory(const Job& job, const JobFacts& facts) {
  const std::string excess = memory_excess(job, facts);
  if (!excess.empty()) throw ConfigError(excess);
}

void warn_of_few_cores(int64_t ranks) {
  const int64_t cores = cluster::available_cores();
  if (ranks <= cores) return;
  std::cerr << format(
      "warning: {} ranks share {}, so that each step takes about {:.2g} times "
      "as long as with a core for each rank\n",
      ranks, counted(cores, "core"),
      static_cast<double>(ranks) / static_cast<double>(cores));
}

// Lets a job's ranks be devices of a cluster that is not here.
void place_on(Job& job, const cluster::Cluster& cluster) {
  const cluster::Device& device = cluster.node_of(0).device;
  job.comm.backend = BackendKind::automatic;
  job.comm.device = device.processor ? DeviceKind::cpu : DeviceKind::cuda;
  job = with_compute_dtype(std::move(job), device);
  if (job.memory.limit_bytes == 0) {
    job.memory.limit_bytes = static_cast<int64_t>(cost::usable_bytes(device));
  }
}

// A step of the configuration on the devices of --on, operator by operator.
SimulateArguments
step_on(const TrainArguments& arguments, const std::string& config) {
  SimulateArguments step;
  step.config = config;
  step.cluster = arguments.on;
  step.count = true;
  step.memory_is_planned = true;
  return step;
}

// echelon-train counts the layers, since it knows their operators.
int dry_run(const TrainArguments& arguments) {
  Job job = load(arguments.job);
  if (job.train.steps == 0 && job.train.epochs == 0) job.train.steps = 1;
  const bool here = arguments.on.empty();
  JobFacts facts = check(arguments.job, job);
  count_own_parameters(job, facts);
  job.model.classes = facts.classes;
  Job placed = job;
  if (!here) place_on(placed, cluster::find_cluster(arguments.on));
  const ScratchConfig config(placed);
  std::vector<std::string> command = {
      find_echelon_train(), "plan", config.path(), "--host-bytes",
      std::to_string(here ? host_bytes() : 0)};
  if (arguments.json) command.push_back("--json");
  const Style style = terminal_style();
  if (style.colours) command.push_back("--colours");
  command.insert(
      command.end(),
      {"--columns", std::to_string(std::min<size_t>(style.columns, 100))});
  const Captured counted = capture(command, std::chrono::minutes(10));
  std::cerr << counted.err;
  if (counted.timed_out) {
    throw Error("--dry-run: the layers were not counted within 10 minutes");
  }
  if (here || counted.exit_code != 0) {
    std::cout << counted.out;
    if (!arguments.json && counted.exit_code == 0) {
      std::cout << describe_copies(job, facts, arguments.job.num_hosts);
    }
    std::cout << std::flush;
    return counted.exit_code;
  }
  const ScratchConfig own(job);
  const SimulateArguments step = step_on(arguments, own.path());
  if (arguments.json) {
    auto json = nlohmann::ordered_json::parse(counted.out);
    json["step"] = simulated_json(step);
    print_json(json, std::cout);
    return 0;
  }
  std::cout << counted.out << "\n\n" << std::flush;
  return run_simulate(step);
}

// Whether a setting says only what a run reports and keeps: a finished run is
// the same with any value of it.
bool changes_no_result(const SettingChange& change) {
  static const std::set<std::pair<std::string, std::string>> kReports = {
      {"train", "log_every"},
      {"train", "timeline_steps"},
      {"train", "log"},
      {"checkpoint", "resume"},
      {"checkpoint", "every_steps"},
      {"checkpoint", "every_minutes"},
      {"checkpoint", "at_end"},
      {"checkpoint", "keep"},
      {"checkpoint", "async"},
      {"checkpoint", "attempts"},
      {"checkpoint", "force"},
      {"checkpoint", "remote"}};
  return change.table == "elastic" ||
         kReports.contains({change.table, change.key});
}

std::filesystem::path named_folder(const std::filesystem::path& run) {
  return run.has_filename() ? run : run.parent_path();
}

// Throws when a finished run is started with other settings: nothing would be
// done with them.
void check_same_settings(const Job& job, const JobFacts& facts) {
  namespace fs = std::filesystem;
  const fs::path run = fs::path(job.train.run).lexically_normal();
  std::vector<SettingChange> changes;
  try {
    Job before = load_job((run / "config.toml").string());
    before.train.overwrite = job.train.overwrite;
    // A job that was resized has done what its command says.
    std::error_code error;
    if (fs::exists(run / kFirstLayout, error)) {
      before = predict::replanned(before, read_text_file(run / kFirstLayout));
    }
    changes = changed_settings(to_toml(job), to_toml(before));
  } catch (const ConfigError&) {
    return;  // written by another version
  }
  std::erase_if(changes, changes_no_result);
  if (changes.empty()) return;
  std::vector<std::string> lines;
  for (const auto& [table, key, now, before] : changes) {
    lines.push_back(format("[{}] {} = {}, not {}", table, key, now, before));
  }
  constexpr size_t kShown = 5;
  if (lines.size() > kShown) {
    lines[kShown] = format("{} more", lines.size() - kShown);
    lines.resize(kShown + 1);
  }
  const std::string name = named_folder(run).string();
  int number = 2;
  std::error_code error;
  while (fs::exists(format("{}-{}", name, number), error)) ++number;
  throw ConfigError(format(
      "{} has all its {}, with other settings: {}\n"
      "start a run of its own (--set train.run={}-{}, or train.run="
      "\"{}-{{set}}\" in a sweep), or replace it (--overwrite)",
      job.train.run, counted(facts.steps, "step"), join(lines, "; "), name,
      number, name));
}

// Whether a run's last checkpoint is on its storage too, if it has one.
bool is_uploaded(const Job& job, int64_t step) {
  const std::string& url = job.checkpoint.remote;
  if (url.empty()) return true;
  const auto there = RemoteCheckpoints(url).list();
  if (!there.empty() && there.front().step >= step) return true;
  std::cout << format(
                   "{} has all its steps, but {} lacks the last checkpoint: it "
                   "is uploaded\n",
                   job.train.run, url)
            << std::flush;
  return false;
}

// Whether a run that would be resumed has all its steps already, and everything
// that is made after them: a crash at its end may have left some of it out.
bool is_done(const Job& job, const JobFacts& facts) {
  const auto latest =
      latest_checkpoint(std::filesystem::path(job.train.run) / "checkpoints");
  if (!latest || latest->step < facts.steps) return false;
  check_same_settings(job, facts);
  if (!is_uploaded(job, latest->step)) return false;
  const std::filesystem::path run = job.train.run;
  std::vector<const char*> outcome = {"report.html", "timeline.json"};
  if (job.checkpoint.at_end) outcome.push_back("checkpoints/last.safetensors");
  std::string lacks;
  for (const char* made : outcome) {
    std::error_code error;
    if (lacks.empty() && !std::filesystem::exists(run / made, error)) {
      lacks = made;
    }
  }
  // A timeline of an earlier process may lie beside a page that this one made
  // while it trained.
  if (lacks.empty() && !report::has_final_report(run)) {
    lacks = "report.html of its end";
  }
  if (!lacks.empty()) {
    std::cout << format(
                     "{} has {} of {}, but no {}: it is made from the last "
                     "checkpoint\n",
                     job.train.run, format_count(latest->step),
                     counted(facts.steps, "step"), lacks)
              << std::flush;
    return false;
  }
  std::cout << format(
      "{} is finished: it has {} of {}; raise train.steps or "
      "train.epochs to continue, "
      "--overwrite starts again\n",
      job.train.run, format_count(latest->step), counted(facts.steps, "step"));
  return true;
}

// Throws where hosts would not agree on the run's folder.
void check_folder_of_hosts(const Job& job, int num_nodes) {
  if (num_nodes == 1) return;
  for (const auto& [table, key] :
       {std::pair("train", "run"), std::pair("checkpoint", "remote")}) {
    const auto* named = job.document.value(table, key);
    if (named == nullptr || named->string.find("{time}") == std::string::npos) {
      continue;
    }
    throw ConfigError(
        job.document.where(format("{}.{}", table, key)) +
        ": hosts would name the run differently; leave {time} out with "
        "--nnodes");
  }
}

// The layout of the job on another number of ranks. Throws ConfigError where it
// cannot go on with so many.
std::string resize(int num_ranks, Replans* replans) {
  if (num_ranks < 1 || num_ranks > kMaxRanks) {
    throw ConfigError(format("ranks must be from 1 to {}", kMaxRanks));
  }
  if (replans == nullptr) {
    throw ConfigError(
        "it saves no state that the new ranks could go on from; set "
        "checkpoint.every_steps, or leave restarts and [elastic] memory on");
  }
  return replans->layout(num_ranks);
}

// The numbers of ranks that a job may come to have.
RankCounts
possible_counts(const Job& job, const launch::LaunchOptions& options) {
  const int64_t ranks = job.layout.num_ranks();
  if (options.num_nodes == 1) {
    constexpr int64_t kMostPlanned = 64;
    return {
        .low = 1, .high = std::max(ranks, std::min(2 * ranks, kMostPlanned))};
  }
  const int64_t per_host = ranks / options.num_nodes;
  const int least =
      options.least_nodes > 0 ? options.least_nodes : options.num_nodes;
  return {.low = least * per_host, .high = ranks, .per_host = per_host};
}

// Writes the configuration of the job in another layout.
void use_layout(const Job& job, const Job& other) {
  const auto run = std::filesystem::path(job.train.run);
  write_file_atomically(
      run / kFirstLayout, format(
                              "{} recompute={}", to_string(job.layout),
                              to_string(job.memory.recompute)));
  write_configuration(other, run);
}

// The host that coordinated before has the lock while its launcher ends, or
// again when it has come back to this job. The next generation tries again.
void lock_run(
    const std::filesystem::path& run, std::optional<RunFolder>& made) {
  try {
    made =
        RunFolder{"", std::make_unique<CheckpointLock>(run, /*waits=*/false)};
  } catch (const CheckpointError&) {
  }
}

// What the hosts of a job must have in common. Each may have its data, and its
// view of the run's folder, in a place of its own.
std::string identity_of(Job job) {
  job.train.overwrite = false;
  job.train.run = "run";
  job.data = {};
  const std::string text = to_toml(job);
  return format(
      "{} {}", build_info::kVersion, checksum(text.data(), text.size()));
}

// Whether a job writes to a run's folder now.
bool is_in_use(const std::filesystem::path& run) {
  try {
    check_unlocked(run);
    check_unlocked(run / "checkpoints");
    return false;
  } catch (const CheckpointError&) {
    return true;
  }
}

// The ranks of each host where neither the user nor a layout says how many, and
// something else does; else empty.
std::string ranks_of_host(const JobHosts& hosts, const JobArguments& job) {
  if (!job.num_ranks.empty() || !job.overrides.layout.empty() ||
      hosts.num_ranks == 0 || load(job).layout.num_ranks() != 1) {
    return "";
  }
  for (const RemoteHost& host : hosts.remote) {
    if (host.num_ranks == hosts.num_ranks) continue;
    throw ConfigError(format(
        "--hostfile: {} has slots={}, and {} slots={}; hosts that train a "
        "model have equal numbers of ranks: give -n",
        hosts.remote[0].name, hosts.num_ranks, host.name, host.num_ranks));
  }
  return std::to_string(ranks_of_each(hosts));
}

// Handles SIGTERM until the launcher takes signals: no rank has begun.
void end_as_preempted(int) {
  std::_Exit(static_cast<int>(ExitCode::preempted));
}

int train(const TrainArguments& given) {
  if (::signal(SIGTERM, end_as_preempted) == SIG_IGN) {
    ::signal(SIGTERM, SIG_IGN);
  }
  TrainArguments arguments = given;
  const JobHosts hosts = find_hosts(arguments.hosts);
  launch::LaunchOptions options =
      host_options(arguments.hosts, HostsOf::elastic);
  arguments.job.num_hosts = options.num_nodes;
  const std::string ranks = ranks_of_host(hosts, arguments.job);
  if (!ranks.empty()) arguments.job.num_ranks = ranks;
  say_ranks(hosts, arguments.job.num_ranks);
  if (arguments.dry_run) return dry_run(arguments);
  if (!arguments.on.empty()) {
    throw ConfigError(format(
        "--on {}: says where a dry run's step would run; give --dry-run too",
        arguments.on));
  }
  if (arguments.json) {
    throw ConfigError(
        "echelon train: --json prints what --dry-run finds; give both, or "
        "read metrics.jsonl of the run");
  }
  Job job = load(arguments.job);
  JobFacts facts = check(arguments.job, job);
  if (job.comm.device == DeviceKind::automatic &&
      cluster::ask_cuda().gpus.empty()) {
    check_compute_on_processor(job);
  }
  job.model.classes = facts.classes;
  check_hosts(job, options.num_nodes);
  check_folder_of_hosts(job, options.num_nodes);
  if (hosts.by != JobHosts::By::started && !arguments.check) {
    return start_on_hosts(hosts, arguments.hosts, "train", ranks);
  }
  const auto run = std::filesystem::path(job.train.run);
  // Node 0 makes the folder before the hosts meet; the others see it then. When
  // the job runs already, this host was lost and comes back.
  bool first = options.node_rank == 0 && !options.joins;
  if (first && options.num_nodes > 1 && is_in_use(run)) {
    first = false;
    std::cerr << format(
        "echelon: a job writes to {}; this host waits to be taken into it\n",
        job.train.run);
  }
  const bool resumes = first ? check_run_folder(job)
                             : !job.train.overwrite &&
                                   std::filesystem::exists(run / "config.toml");
  if (arguments.check) {
    count_own_parameters(job, facts);
    print_facts(job, facts);
    return 0;
  }
  if (resumes && is_done(job, facts)) return 0;
  find_echelon_train();  // throws before the run folder is made
  count_own_parameters(job, facts);
  check_memory(job, facts);
  warn_of_few_cores(job.layout.num_ranks() / options.num_nodes);
  options.log_dir = (run / "log").string();
  options.preemptible = true;
  options.host = needs_of(job, facts, options.num_nodes);
  options.max_restarts = !arguments.max_restarts.empty()
                             ? parse_max_restarts(arguments.max_restarts)
                             : 3;
  const auto memory = memory_of_restarts(job, facts, options);
  std::optional<MemoryServer> memory_server;
  options.on_met = [&](const std::string& address,
                       const authentication::Key& key) {
    return memory ? serve(*memory, address, key, memory_server) : -1;
  };
  options.last_step = [&, folder = run / "checkpoints"] {
    const auto latest = latest_checkpoint(folder);
    const int64_t on_disk = latest ? latest->step : 0;
    if (!memory) return on_disk;
    const auto in_memory =
        options.num_nodes == 1 ? memory->collect() : memory->newest_step();
    return std::max(on_disk, in_memory.value_or(0));
  };
  const auto launch = [&](const std::vector<std::string>& words) {
    return launch_echelon_train(
        words, job.layout.num_ranks(), job.train.ranks, options);
  };
  options.control = [run] {
    const std::string name = control_name(run);
    // The pool that started this job finds it by that file.
    if (const char* path = std::getenv("ECHELON_POOL_CONTROL")) {
      write_file_atomically(path, name);
    }
    return name;
  };
  options.metrics = {
      .address = arguments.metrics_address,
      .run = named_folder(run.lexically_normal()).filename().string(),
      .folder = run,
      .saves = saves(job.checkpoint),
      .text_file = arguments.metrics_file,
      .each_minute = [run,
                      began = std::filesystem::file_time_type::clock::now()] {
        watch::write_interim_report(run, began);
      }};
  std::optional<Replans> replans;
  if (job.train.ranks == RankKind::processes) {
    options.resize = [&](int num_ranks) {
      return resize(num_ranks, replans ? &*replans : nullptr);
    };
    options.step_seconds = [&](int num_ranks) {
      return replans ? replans->step_seconds(num_ranks) : 0;
    };
    options.peak_seconds = [&](int num_ranks) {
      return replans ? replans->peak_seconds(num_ranks) : 0;
    };
  }
  if (options.num_nodes > 1) options.identity = identity_of(job);
  std::optional<RunFolder> made;
  // Where hosts change, ranks of a host cannot wait until another one has
  // written to the run's folder.
  std::optional<ScratchConfig> config;
  options.use_layout = [&](const std::string& layout, bool coordinates) {
    if (coordinates && !made) lock_run(run, made);
    if (layout.empty()) return;
    const Job other = predict::replanned(job, layout);
    if (memory && options.num_nodes == 1) {
      memory->grow(static_cast<int>(other.layout.num_ranks()));
    }
    if (coordinates) use_layout(job, other);
    if (config) config->write(other);
  };
  if (first) {
    made = make_run_folder(job);
    std::error_code error;
    std::filesystem::remove(run / kFirstLayout, error);
  }
  if (options.resize && (memory || saves(job.checkpoint))) {
    replans.emplace(job, facts, possible_counts(job, options));
  }
  if (options.num_nodes == 1) {
    return launch({"train", made->configuration, "--made"});
  }
  job.train.overwrite = false;
  config.emplace(job);
  return launch({"train", config->path(), "--made"});
}

}  // namespace

void add_train(Command& root) {
  auto [command, arguments] = root.add(
      "train", "train a model on one or more ranks of one or more hosts",
      "echelon train first.toml -n 2\n"
      "echelon train first.toml -n 2 --set train.steps=100 --overwrite\n"
      "echelon train first.toml --layout dp=4 --ranks threads\n"
      "echelon train first.toml -n 2 --max-restarts 0   end at the first "
      "failure\n"
      "echelon train first.toml --resume runs/other   from its newest "
      "checkpoint\n"
      "echelon train first.toml --set train.seed=2 "
      "--set 'train.run=runs/{name}-{set}'\n"
      "echelon train first.toml -n 8 --nnodes 2 --node-rank 0 --master-addr "
      "10.0.0.1\n"
      "echelon train first.toml -n 8 --nnodes 2:4 --join 10.0.0.1   one more "
      "host\n"
      "echelon train first.toml -n 8 --hosts a,b   on both, by ssh\n"
      "echelon train first.toml --check        check everything, start "
      "nothing\n"
      "echelon train first.toml --dry-run      each rank's memory and "
      "communication\n"
      "echelon train first.toml --dry-run --on h100-sxm:8   and a step there",
      train);
  add_job_arguments(command, arguments.job, true);
  add_host_arguments(command, arguments.hosts, HostsOf::elastic);
  command.option(
      "--max-restarts", arguments.max_restarts, "N",
      "start all ranks again, up to N times, when one of them fails (default: "
      "3); a host that is lost does not count");
  add_metrics_arguments(
      command, arguments.metrics_address, arguments.metrics_file);
  auto& overrides = arguments.job.overrides;
  command.flag(
      "--overwrite", overrides.overwrite,
      "replace the run folder if it exists");
  command.option(
      "--resume", overrides.resume, "FOLDER",
      "start from another run's folder or from a checkpoint, also on object "
      "storage (s3://BUCKET/PREFIX); auto: a run resumes from its own newest "
      "checkpoint (default); never: it does not");
  command.flag(
      "--check", arguments.check,
      "check the configuration and the files that it names; start nothing");
  command.flag(
      "--dry-run", arguments.dry_run,
      "print each rank's peak memory by kind, and the collectives of a step; "
      "start nothing");
  command.option(
      "--on", arguments.on, "CLUSTER",
      "with --dry-run: the devices, as in echelon simulate; also print a step "
      "on them, operator by operator");
  command.flag(
      "--json", arguments.json, "print the result of --dry-run as JSON");
}

}  // namespace echelon::cli
