#include "echelon/cli/deployed.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <sstream>

#include "echelon/authentication/key.h"
#include "echelon/cli/count.h"
#include "echelon/cli/job_memory.h"
#include "echelon/cli/programs.h"
#include "echelon/cluster/catalogue.h"
#include "echelon/cost/memory_estimate.h"
#include "echelon/error.h"
#include "echelon/job/compute_dtype.h"
#include "echelon/pool/settings.h"
#include "echelon/predict/configured.h"
#include "echelon/predict/predict_run.h"
#include "echelon/predict/replan.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"
#include "echelon/text/units.h"

namespace echelon::cli {
namespace {

constexpr double kGibibyte = 1024.0 * 1024 * 1024;
// A rank's program, with LibTorch; on a GPU also CUDA's libraries and context.
constexpr double kBytesOfProgram = 0.5 * kGibibyte;
constexpr double kBytesOfGpuProgram = 4 * kGibibyte;
// To a file system that hosts share, from each of them.
constexpr double kSaveBytesPerSecond = 200e6;
constexpr double kUploadBytesPerSecond = 100e6;  // as 1 Gbit/s has, nearly
constexpr double kSecondsToEnd = 30;
constexpr int64_t kMostHostsOfJob = 1 << 16;

// Hosts, as in --nnodes 4 or 2:4; `least` is 0 where they do not change.
struct HostCount {
  int64_t least = 0;
  int64_t most = 1;
};

HostCount hosts_of(const DeployArguments& arguments) {
  const std::string& text = arguments.num_nodes;
  if (text.empty()) {
    const auto named = static_cast<int64_t>(arguments.settings.nodes.size());
    return {.most = std::max<int64_t>(1, named)};
  }
  const size_t colon = text.find(':');
  if (colon == std::string::npos) {
    return {.most = parse_count("--nnodes", text, 1, kMostHostsOfJob)};
  }
  const int64_t least =
      parse_count("--nnodes MIN", text.substr(0, colon), 1, kMostHostsOfJob);
  const int64_t most = parse_count(
      "--nnodes MAX", text.substr(colon + 1), std::max<int64_t>(2, least),
      kMostHostsOfJob);
  return {.least = least, .most = most};
}

std::vector<std::string> listed(const std::string& text) {
  std::vector<std::string> items;
  std::istringstream stream(text);
  for (std::string item; std::getline(stream, item, ',');) {
    items.push_back(item);
  }
  return items;
}

// Whether a configuration says that its ranks compute on processors.
bool on_processors(const Job& job) {
  return job.comm.device == DeviceKind::cpu ||
         (job.comm.device == DeviceKind::automatic &&
          (job.comm.backend == BackendKind::local ||
           job.comm.backend == BackendKind::gloo));
}

// The number of ranks of each host and whether they have GPUs. --gpus-per-node
// 0 says that they have none; above 0 it stands for -n.
bool take_devices(const DeployArguments& arguments, JobArguments& job) {
  if (arguments.gpus_per_node.empty()) return true;
  const int64_t gpus =
      parse_count("--gpus-per-node", arguments.gpus_per_node, 0, kMaxRanks);
  if (gpus == 0) return false;
  if (job.num_ranks.empty()) job.num_ranks = arguments.gpus_per_node;
  const int64_t ranks = parse_count("-n", job.num_ranks, 1, kMaxRanks);
  if (ranks != gpus) {
    throw ConfigError(format(
        "--gpus-per-node {}, but -n {}: each rank has one GPU; give one of "
        "them",
        gpus, ranks));
  }
  return true;
}

// The bytes that the fullest rank takes of its device, by formulas; those of
// unsharded state where they do not know the model.
double bytes_of_rank(const Job& job, const JobFacts& facts, double& offloaded) {
  try {
    const auto what = predict::configured(job, facts);
    const auto memory = cost::estimate_memory(what.model, what.strategy);
    offloaded = memory.host_bytes;
    return memory.peak_bytes();
  } catch (const ConfigError&) {
    return bytes_of_training(job, facts) + kBytesOfProgram;
  }
}

void plan_memory(
    const DeployArguments& arguments, const Job& job, const JobFacts& facts,
    deploy::Workload& workload) {
  if (!arguments.memory.empty()) {
    workload.memory_bytes =
        parse_size("--memory", arguments.memory, 64 << 20, int64_t{1} << 50);
    workload.memory_parts = "as --memory says.";
    return;
  }
  double offloaded = 0;
  double rank = bytes_of_rank(job, facts, offloaded);
  rank =
      (workload.gpus ? kBytesOfGpuProgram : kBytesOfProgram + rank) + offloaded;
  const auto hosts = static_cast<double>(workload.hosts);
  const double ranks = static_cast<double>(workload.ranks_per_host) * rank;
  const double saving = bytes_of_state(job, facts) / hosts;
  double bytes = ranks + saving;
  workload.memory_parts = format(
      "{} of {} each by the plan, and {} while a checkpoint is written",
      counted(workload.ranks_per_host, "rank"), format_bytes(rank),
      format_bytes(saving));
  // Copies of the state are made where they are a quarter of a host's memory at
  // most.
  const double copies =
      bytes_of_copies(job, facts, static_cast<int>(workload.hosts));
  if (job.elastic.memory != MemoryCopies::off) {
    if (4 * copies <= 2 * bytes) {
      bytes = std::max(bytes, 4.1 * copies);
      workload.memory_parts += format(
          ". Copies of the state for restarts take {} of it.",
          format_bytes(copies));
    } else {
      workload.memory_parts += format(
          ". There is no room for copies of the state for restarts: they need "
          "--memory {}GiB.",
          static_cast<int64_t>(std::ceil(4.1 * copies / kGibibyte)));
    }
  } else {
    workload.memory_parts += ".";
  }
  workload.memory_bytes = static_cast<int64_t>(bytes);
}

void plan_grace(
    const DeployArguments& arguments, const Job& job, const JobFacts& facts,
    const std::optional<cluster::Cluster>& cluster,
    deploy::Workload& workload) {
  double step = 0;
  if (cluster) {
    step = predict::predict_step(
               predict::configured(
                   with_compute_dtype(job, cluster->node_of(0).device), facts),
               cluster->first(job.layout.num_ranks()))
               .step_seconds;
  }
  const auto bytes = bytes_of_state(job, facts);
  double save =
      bytes / kSaveBytesPerSecond / static_cast<double>(workload.hosts);
  std::string because = format(
      "{} for a checkpoint of {} from {} at 200 MB/s each",
      format_seconds(save), format_bytes(bytes),
      counted(workload.hosts, "host"));
  if (!arguments.save_seconds.empty()) {
    save = static_cast<double>(
        parse_count("--save-seconds", arguments.save_seconds, 1, 86400));
    because =
        format("{} for a checkpoint (--save-seconds)", format_seconds(save));
  }
  double upload = 0;
  if (!job.checkpoint.remote.empty()) {
    upload =
        bytes / kUploadBytesPerSecond / static_cast<double>(workload.hosts);
    std::string from = "at 100 MB/s from each";
    if (!arguments.upload_seconds.empty()) {
      upload = static_cast<double>(
          parse_count("--upload-seconds", arguments.upload_seconds, 1, 86400));
      from = "(--upload-seconds)";
    }
    because += format(
        ", {} to upload it to {} {}", format_seconds(upload),
        job.checkpoint.remote, from);
  } else if (!arguments.upload_seconds.empty()) {
    throw ConfigError(
        "--upload-seconds: checkpoints are not uploaded; set checkpoint.remote "
        "to an address such as s3://BUCKET/PREFIX, or leave it out");
  }
  workload.grace_seconds = static_cast<int64_t>(
      10 * std::ceil((step + save + upload + kSecondsToEnd) / 10));
  workload.grace_parts = format(
      "{}{}, and 30 s for the ranks to end.",
      step > 0 ? format("{} for a step, ", format_seconds(step)) : "", because);
}

// The fewest hosts from `least` on for which a layout fits.
int64_t fewest_that_fit(
    const Job& job, const JobFacts& facts, const deploy::Workload& workload,
    const std::optional<cluster::Cluster>& cluster) {
  for (int64_t hosts = workload.least_hosts; hosts < workload.hosts; ++hosts) {
    const int64_t ranks = hosts * workload.ranks_per_host;
    try {
      predict::replan(
          job, facts, ranks,
          {.cluster =
               cluster ? std::optional(cluster->first(ranks)) : std::nullopt,
           .missing = cluster ? "" : "Nothing is predicted: no --cluster."});
      return hosts;
    } catch (const ConfigError&) {
    }
  }
  return workload.hosts;
}

void check_restarts(const Job& job) {
  const auto* run = job.document.value("train", "run");
  if (run != nullptr && run->string.find("{time}") != std::string::npos) {
    throw ConfigError(
        job.document.where("train.run") +
        ": a job that is queued again would begin another run; leave {time} "
        "out");
  }
}

void check_cluster(
    const cluster::Cluster& cluster, const deploy::Workload& workload) {
  const int64_t ranks = workload.hosts * workload.ranks_per_host;
  if (cluster.num_devices() >= ranks) return;
  throw ConfigError(format(
      "--cluster: has {}, but {} of {} are {} ranks; give a larger one or "
      "fewer hosts",
      counted(cluster.num_devices(), "device"), counted(workload.hosts, "host"),
      counted(workload.ranks_per_host, "rank"), ranks));
}

std::vector<deploy::Project> projects_of(const std::string& path) {
  const pool::Settings pool = pool::read_settings(path);
  if (pool.devices > 0) pool::check_capacity(pool, path, pool.devices);
  std::vector<deploy::Project> projects;
  for (const pool::Project& one : pool.projects) {
    projects.push_back(
        {.name = one.name,
         .guaranteed = one.guaranteed,
         .weight = one.weight,
         .limit = one.limit == pool::kNoLimit ? -1 : one.limit,
         .parent = one.parent < 0
                       ? ""
                       : pool.projects[static_cast<size_t>(one.parent)].name});
  }
  return projects;
}

}  // namespace

std::string in_path(const std::string& program) {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string file = (folder.empty() ? "." : folder) + "/" + program;
    if (::access(file.c_str(), X_OK) == 0) return file;
  }
  return "";
}

Deployed deployed(const DeployArguments& given) {
  DeployArguments arguments = given;
  if (arguments.engine.empty()) {
    throw ConfigError(format(
        "--to is missing: where the job runs, one of {}",
        join(deploy::engine_names(), ", ")));
  }
  Deployed made{.engine = deploy::engine_from_name(arguments.engine)};
  deploy::Settings& settings = arguments.settings;
  settings.nodes = listed(arguments.hosts);
  const HostCount hosts = hosts_of(arguments);
  const bool may_have_gpus = take_devices(arguments, arguments.job);
  arguments.job.num_hosts = hosts.most;
  Job job = load(arguments.job);
  JobFacts facts = check(arguments.job, job);
  count_own_parameters(job, facts);
  job.model.classes = facts.classes;
  check_hosts(job, static_cast<int>(hosts.most));
  check_restarts(job);

  deploy::Workload& workload = made.workload;
  workload.file = arguments.job.path;
  workload.configuration = read_text_file(arguments.job.path);
  for (const auto& set : arguments.job.overrides.set) {
    workload.options.insert(workload.options.end(), {"--set", set});
  }
  if (!arguments.job.overrides.layout.empty()) {
    workload.options.insert(
        workload.options.end(), {"--layout", arguments.job.overrides.layout});
  }
  if (!arguments.job.overrides.ranks.empty()) {
    workload.options.insert(
        workload.options.end(), {"--ranks", arguments.job.overrides.ranks});
  }
  workload.layout = to_string(job.layout);
  workload.run = job.train.run;
  workload.saves = saves(job.checkpoint);
  workload.remote = job.checkpoint.remote;
  workload.object_storage = to_toml(job).find("\"s3://") != std::string::npos;
  workload.hosts = hosts.most;
  workload.least_hosts = hosts.least;
  workload.ranks_per_host = job.layout.num_ranks() / hosts.most;
  workload.gpus = may_have_gpus && !on_processors(job);
  if (job.layout.tp > 1) {
    workload.tp_span = job.layout.tp * job.layout.stride(Axis::tp);
  }
  if (!arguments.max_restarts.empty()) {
    workload.max_restarts = parse_max_restarts(arguments.max_restarts);
  }
  const int64_t threads = job.train.threads > 0 ? job.train.threads
                          : workload.gpus       ? 4
                                                : 1;
  workload.cores_per_host =
      arguments.cpus_per_node.empty()
          ? threads * workload.ranks_per_host
          : parse_count("--cpus-per-node", arguments.cpus_per_node, 1, 1 << 14);

  std::optional<cluster::Cluster> cluster;
  if (!arguments.cluster.empty()) {
    cluster = cluster::find_cluster(arguments.cluster);
    check_cluster(*cluster, workload);
  }
  plan_memory(arguments, job, facts, workload);
  plan_grace(arguments, job, facts, cluster, workload);
  if (workload.elastic()) {
    workload.fewest_that_fit = fewest_that_fit(job, facts, workload, cluster);
  }

  if (settings.name.empty()) {
    settings.name = deploy::name_of(arguments.job.path);
  }
  if (arguments.new_token) {
    settings.token = authentication::Key::random().to_hex();
  }
  if (!arguments.metrics_port.empty()) {
    settings.metrics_port =
        parse_count("--metrics-port", arguments.metrics_port, 1, 65535);
  }
  if (!arguments.pool.empty()) {
    settings.projects = projects_of(arguments.pool);
  }
  made.settings = settings;
  made.text = deploy::deployment(made.engine, workload, settings);
  if (workload.hosts_of_tp() > 1 && settings.topology.empty()) {
    std::cerr << format(
        "warning: groups of tensor parallelism (tp={}) are spread over {}; "
        "they need NVLink between hosts{}\n",
        job.layout.tp, counted(workload.hosts_of_tp(), "host"),
        deploy::is_kubernetes(made.engine) ? ", which --topology asks for"
                                           : "");
  }
  return made;
}

void add_deploy_arguments(Command& command, DeployArguments& arguments) {
  deploy::Settings& settings = arguments.settings;
  command.required_option(
      "--to", arguments.engine, join(deploy::engine_names(), "|").c_str(),
      "where the job runs");
  add_job_arguments(command, arguments.job, true);
  command.option(
      "--nnodes", arguments.num_nodes, "HOSTS|MIN:MAX",
      "hosts of the job (default: 1). MIN:MAX: hosts may come and go while it "
      "runs");
  command.option(
      "--gpus-per-node", arguments.gpus_per_node, "GPUS",
      "a GPU for each rank: the same as -n; 0: the ranks compute on the "
      "processor");
  command.option(
      "--cpus-per-node", arguments.cpus_per_node, "CORES",
      "cores of each host (default: 4 for each GPU, or train.threads)");
  command.option(
      "--memory", arguments.memory, "BYTES",
      "memory of each host, as in 64GiB (default: what the plan says)");
  command.option(
      "--cluster", arguments.cluster, "CLUSTER",
      "the devices, as in echelon simulate: a step's time and the smallest "
      "layout are predicted for them");
  command.option(
      "--save-seconds", arguments.save_seconds, "SECONDS",
      "how long a checkpoint takes (default: its size at 200 MB/s from each "
      "host)");
  command.option(
      "--upload-seconds", arguments.upload_seconds, "SECONDS",
      "with checkpoint.remote, how long its upload takes (default: its size at "
      "100 MB/s from each host)");
  command.option(
      "--max-restarts", arguments.max_restarts, "N",
      "restarts after failures, by the launcher and by the engine (default: "
      "3)");
  command.option(
      "--name", settings.name, "NAME",
      "the job's name (default: that of the configuration)");
  command.option(
      "--volume", settings.volume, "CLAIM|FOLDER",
      "what all hosts share: a PersistentVolumeClaim, or an absolute folder "
      "that all have; paths of the configuration begin there");
  command.option(
      "--mount", settings.mount, "FOLDER",
      "Kubernetes: where pods have the claim (default: /work)");
  command.option(
      "--image", settings.image, "IMAGE",
      "Kubernetes: the image of the pods; slurm: of srun's containers (pyxis)");
  command.option(
      "--namespace", settings.name_space, "NAME",
      "Kubernetes: the namespace (default: kubectl's)");
  command.option(
      "--queue", settings.queue, "QUEUE", "kueue, kai: the job's queue");
  command.option(
      "--pool", arguments.pool, "POOL.toml",
      "kueue, kai: also write the queues of these projects");
  command.option(
      "--topology", settings.topology, "LABEL",
      "Kubernetes: the label of nodes in one NVLink domain or rack");
  command.flag(
      "--new-token", arguments.new_token,
      "Kubernetes: write a new secret for the job's hosts into the manifests; "
      "without it, the command that makes one is printed");
  command.option(
      "--metrics-port", arguments.metrics_port, "PORT",
      "Kubernetes: Prometheus reads metrics at this port (PodMonitor)");
  command.option(
      "--account", settings.account, "ACCOUNT", "slurm: the account");
  command.option(
      "--partition", settings.partition, "PARTITION", "slurm: the partition");
  command.option("--qos", settings.qos, "QOS", "slurm: the quality of service");
  command.option(
      "--time", settings.time_limit, "TIME",
      "slurm: the time limit, as in 1-12:00:00");
  command.option(
      "--gpu-type", settings.gpu_type, "TYPE",
      "slurm: the kind of GPU, as in h100");
  command.option(
      "--hosts", arguments.hosts, "HOST,…",
      "ssh: the hosts; the first one leads");
}

}  // namespace echelon::cli
