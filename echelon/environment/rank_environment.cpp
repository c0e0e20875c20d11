// Variables are read through a function, so that tests need no environment of
// their own. The names of torchrun say all that a rank must know. srun and
// mpirun say neither an address nor a port of rank 0: the port is a hash of the
// job's id, the same on every rank, and the host comes from the list of nodes
// or from the address of mpirun's own daemon. The variables that the launcher
// sets are at the end.
#include "echelon/environment/rank_environment.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <map>
#include <random>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

int number(const GetVariable& get, const char* name) {
  const auto text = get(name);
  if (!text) {
    throw ConfigError(format(
        "environment: {} is not set, but other variables of the same launcher "
        "are; start the program with `echelon run`, torchrun, srun or mpirun",
        name));
  }
  int value = 0;
  const char* end = text->data() + text->size();
  const auto [rest, error] = std::from_chars(text->data(), end, value);
  if (error != std::errc() || rest != end || value < 0) {
    throw ConfigError(format(
        "environment: {}=\"{}\" must be a whole number, 0 or more", name,
        *text));
  }
  return value;
}

int number_or(const GetVariable& get, const char* name, int otherwise) {
  return get(name) ? number(get, name) : otherwise;
}

/// The variable, or the other one where it is not set.
const char*
either(const GetVariable& get, const char* name, const char* other) {
  return get(name) ? name : other;
}

/// A port that all ranks of a job derive from a text that they share. It lies
/// below 32768: from there on, Linux gives ports to outgoing connections.
/// The hash is FNV-1a: all hosts must compute the same one.
int port_from(const std::string& text) {
  uint64_t hash = 1469598103934665603ull;
  for (unsigned char c : text) hash = (hash ^ c) * 1099511628211ull;
  return static_cast<int>(20000 + hash % 12000);
}

/// The first host of Slurm's "node[03-07,11],gpu2" -> "node03".
std::string first_host(const std::string& list) {
  const size_t bracket = list.find('[');
  const size_t comma = list.find(',');
  if (bracket == std::string::npos || comma < bracket) {
    return list.substr(0, comma);
  }
  const size_t end = list.find_first_of("-,]", bracket + 1);
  return list.substr(0, bracket) + list.substr(bracket + 1, end - bracket - 1);
}

/// How many tasks Slurm starts on a node, from "2(x3),1": three nodes of 2, and
/// one of 1. 0: the text does not say.
int tasks_of_node(const std::string& list, int node) {
  constexpr long kMost = 1 << 16;
  int nodes = 0;
  for (const char* at = list.c_str(); *at != '\0';) {
    char* end = nullptr;
    const long tasks = std::strtol(at, &end, 10);
    long repeated = 1;
    if (end == at || tasks < 1 || tasks > kMost) return 0;
    if (end[0] == '(' && end[1] == 'x') {
      repeated = std::strtol(end + 2, &end, 10);
      if (*end++ != ')' || repeated < 1 || repeated > kMost) return 0;
    }
    nodes += static_cast<int>(repeated);
    if (node < nodes) return static_cast<int>(tasks);
    if (*end != ',') return 0;
    at = end + 1;
  }
  return 0;
}

/// The address in Open MPI's "1234.0;tcp://10.0.0.1,10.1.0.1:40123".
std::string address_of(const std::string& uri) {
  const size_t begin = uri.find("tcp://");
  if (begin == std::string::npos) return "127.0.0.1";
  const size_t end = uri.find_first_of(",:", begin + 6);
  return uri.substr(begin + 6, end - begin - 6);
}

void apply_master(const GetVariable& get, RankEnvironment& env) {
  if (auto address = get("MASTER_ADDR")) env.master_addr = *address;
  if (get("MASTER_PORT")) env.master_port = number(get, "MASTER_PORT");
}

RankEnvironment from_torchrun(const GetVariable& get) {
  RankEnvironment env;
  env.launcher = get("ECHELON_JOB") ? Launcher::echelon : Launcher::torchrun;
  env.rank = number(get, "RANK");
  env.world_size = number(get, "WORLD_SIZE");
  env.local_rank = number_or(get, "LOCAL_RANK", env.rank);
  env.local_world_size = number_or(get, "LOCAL_WORLD_SIZE", env.world_size);
  env.node_rank = number_or(get, "GROUP_RANK", 0);
  if (env.world_size > 1) {
    if (!get("MASTER_ADDR")) {
      throw ConfigError(format(
          "environment: WORLD_SIZE={} but MASTER_ADDR is not set; it is the "
          "host of rank 0",
          env.world_size));
    }
    number(get, "MASTER_PORT");
  }
  apply_master(get, env);
  if (get("ECHELON_MASTER_FD") && env.rank == 0) {
    env.master_fd = number(get, "ECHELON_MASTER_FD");
  }
  env.store_is_served = get("TORCHELASTIC_USE_AGENT_STORE") == "True";
  if (!env.store_is_served) {
    env.store_key = get("ECHELON_STORE_KEY").value_or("");
  }
  env.job =
      get("ECHELON_JOB").value_or(get("TORCHELASTIC_RUN_ID").value_or("job"));
  env.generation = number_or(
      get, either(get, "ECHELON_GENERATION", "TORCHELASTIC_RESTART_COUNT"), 0);
  return env;
}

/// The number of this host's daemon, from "job.NUMBER;tcp://…". Open MPI counts
/// hosts nowhere else (its NODE_RANK is the rank among this host's ranks).
int node_of(const std::string& daemon_uri) {
  const auto dot = daemon_uri.find('.');
  return dot == std::string::npos ? 0 : std::atoi(daemon_uri.c_str() + dot + 1);
}

RankEnvironment from_mpirun(const GetVariable& get) {
  RankEnvironment env;
  env.launcher = Launcher::mpirun;
  env.rank = number(get, "OMPI_COMM_WORLD_RANK");
  env.world_size = number(get, "OMPI_COMM_WORLD_SIZE");
  env.local_rank = number_or(get, "OMPI_COMM_WORLD_LOCAL_RANK", env.rank);
  env.local_world_size =
      number_or(get, "OMPI_COMM_WORLD_LOCAL_SIZE", env.world_size);
  env.node_rank = node_of(get("OMPI_MCA_orte_local_daemon_uri").value_or(""));
  env.job = get("PMIX_NAMESPACE")
                .value_or(get("OMPI_MCA_ess_base_jobid").value_or("mpirun"));
  env.master_port = port_from(env.job);
  if (env.local_world_size != env.world_size) {
    const auto uri = get("OMPI_MCA_orte_hnp_uri");
    env.master_addr = uri ? address_of(*uri) : "127.0.0.1";
  }
  apply_master(get, env);
  return env;
}

RankEnvironment from_srun(const GetVariable& get) {
  RankEnvironment env;
  env.launcher = Launcher::srun;
  env.rank = number(get, "SLURM_PROCID");
  env.world_size =
      number(get, either(get, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"));
  env.local_rank = number_or(get, "SLURM_LOCALID", 0);
  env.node_rank = number_or(get, "SLURM_NODEID", 0);
  const int nodes =
      number_or(get, either(get, "SLURM_STEP_NUM_NODES", "SLURM_NNODES"), 1);
  // SLURM_NTASKS_PER_NODE is what the job asked for, and its steps may differ.
  env.local_world_size = tasks_of_node(
      get("SLURM_STEP_TASKS_PER_NODE").value_or(""), env.node_rank);
  if (env.local_world_size == 0) {
    env.local_world_size = nodes == 1
                               ? env.world_size
                               : number_or(
                                     get, "SLURM_NTASKS_PER_NODE",
                                     (env.world_size + nodes - 1) / nodes);
  }
  env.job = format(
      "slurm-{}.{}", get("SLURM_JOB_ID").value_or("0"),
      get("SLURM_STEP_ID").value_or("0"));
  env.master_port = port_from(env.job);
  if (nodes > 1) {
    const char* list = either(get, "SLURM_STEP_NODELIST", "SLURM_NODELIST");
    env.master_addr = first_host(get(list).value_or(""));
  }
  apply_master(get, env);
  return env;
}

void check(const RankEnvironment& env) {
  const auto in_range = [](const char* name, int value, int size) {
    if (value >= size) {
      throw ConfigError(
          format("environment: {}={} must be below {}", name, value, size));
    }
  };
  if (env.world_size < 1 || env.local_world_size < 1) {
    throw ConfigError("environment: WORLD_SIZE must be 1 or more");
  }
  in_range("RANK", env.rank, env.world_size);
  in_range("LOCAL_RANK", env.local_rank, env.local_world_size);
  if (env.master_port > 65535) {
    throw ConfigError(format(
        "environment: MASTER_PORT={} must be below 65536", env.master_port));
  }
}

}  // namespace

std::string to_string(Launcher launcher) {
  constexpr const char* kNames[] = {"none",   "echelon", "torchrun",
                                    "mpirun", "srun",    "threads"};
  return kNames[static_cast<size_t>(launcher)];
}

RankEnvironment read_environment(const GetVariable& get) {
  RankEnvironment env;
  if (get("RANK") || get("WORLD_SIZE")) {
    env = from_torchrun(get);
  } else if (get("OMPI_COMM_WORLD_RANK")) {
    env = from_mpirun(get);
  } else if (get("SLURM_STEP_ID") && get("SLURM_PROCID")) {
    env = from_srun(get);
  }
  check(env);
  env.memory = get("ECHELON_MEMORY").value_or("");
  env.progress = get("ECHELON_PROGRESS").value_or("");
  return env;
}

RankEnvironment read_environment() {
  return read_environment([](const char* name) -> std::optional<std::string> {
    const char* value = std::getenv(name);
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
  });
}

int threads_of_rank(const RankEnvironment& env, int available, int online) {
  const bool bound =
      env.launcher == Launcher::srun || env.launcher == Launcher::mpirun;
  const int share =
      (bound ? online : available) / std::max(1, env.local_world_size);
  return std::max(1, std::min(available, share));
}

}  // namespace echelon

namespace echelon::launch {

std::vector<std::string> rank_environment(
    const std::vector<std::string>& base, const RankPlace& place,
    const JobPlace& job, const RankFiles& files, const Variables& extra,
    int cores) {
  std::map<std::string, std::string> variables;
  for (const auto& entry : base) {
    const auto equals = entry.find('=');
    if (equals != std::string::npos) {
      variables[entry.substr(0, equals)] = entry.substr(equals + 1);
    }
  }
  // The variables of an outer job's rank are not for this job's ranks.
  for (const char* name :
       {"ECHELON_MASTER_FD", "ECHELON_ERROR_FILE", "ECHELON_NODE_ADDRESS",
        "ECHELON_MEMORY", "ECHELON_PROGRESS", "ECHELON_STORE_KEY",
        "ECHELON_TOKEN"}) {
    variables.erase(name);
  }
  const auto number = [](int value) { return std::to_string(value); };
  variables["RANK"] = number(place.rank);
  variables["WORLD_SIZE"] = number(place.world_size);
  variables["LOCAL_RANK"] = number(place.local_rank);
  variables["LOCAL_WORLD_SIZE"] = number(place.local_world_size);
  variables["GROUP_RANK"] = number(place.node_rank);
  variables["GROUP_WORLD_SIZE"] = number(place.num_nodes);
  variables["ROLE_RANK"] = number(place.rank);
  variables["ROLE_WORLD_SIZE"] = number(place.world_size);
  variables["ROLE_NAME"] = "default";
  variables["MASTER_ADDR"] = job.master_addr;
  variables["MASTER_PORT"] = number(job.master_port);
  variables["TORCHELASTIC_RUN_ID"] = job.job;
  variables["TORCHELASTIC_RESTART_COUNT"] = number(job.generation);
  variables["TORCHELASTIC_MAX_RESTARTS"] = number(job.max_restarts);
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "False";
  variables["ECHELON_JOB"] = job.job;
  variables["ECHELON_GENERATION"] = number(job.generation);
  if (!job.node_address.empty()) {
    variables["ECHELON_NODE_ADDRESS"] = job.node_address;
  }
  if (!job.store_key.empty()) {
    variables["ECHELON_STORE_KEY"] = job.store_key;
  }
  if (!files.error_file.empty()) {
    variables["ECHELON_ERROR_FILE"] = files.error_file;
  }
  if (files.master_fd >= 0) {
    variables["ECHELON_MASTER_FD"] = number(files.master_fd);
  }
  if (!variables.contains("OMP_NUM_THREADS")) {
    variables["OMP_NUM_THREADS"] =
        number(std::max(1, cores / std::max(1, place.local_world_size)));
  }
  for (const auto& [name, value] : extra) {
    variables[name] = value;
  }
  std::vector<std::string> result;
  for (const auto& [name, value] : variables) {
    result.push_back(name + "=" + value);
  }
  return result;
}

std::string random_job_id() {
  std::random_device source;
  std::string id;
  for (int i = 0; i < 16; ++i) {
    id += "0123456789abcdef"[source() % 16];
  }
  return id;
}

}  // namespace echelon::launch
