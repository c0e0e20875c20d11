// srun and mpirun number their tasks as they do for ranks, so a launcher that
// is the only task of its host is read as a rank is. Kubernetes has as many
// conventions as controllers; all but an Indexed Job's own name the first pod.
#include "echelon/environment/engine.h"

#include <netdb.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <cstdlib>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::launch {
namespace {

constexpr int kMostNodes = 1 << 16;

/// The value of a variable that is set.
std::string text_of(const GetVariable& get, const char* name) {
  const auto text = get(name);
  if (!text || text->empty()) {
    throw ConfigError(format(
        "environment: {} is not set, but other variables of the same engine "
        "are",
        name));
  }
  return *text;
}

int count_of(const char* name, const std::string& text, int least) {
  int value = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || rest != end || value < least ||
      value > kMostNodes) {
    throw ConfigError(format(
        "environment: {}=\"{}\" must be a whole number from {} to {}", name,
        text, least, kMostNodes));
  }
  return value;
}

int count_of(const GetVariable& get, const char* name, int least) {
  return count_of(name, text_of(get, name), least);
}

void set_nodes(Engine& engine, int num_nodes) {
  engine.num_nodes = num_nodes;
  engine.nodes = std::to_string(num_nodes);
}

// PET_NNODES is "2" or "1:4". PET_NPROC_PER_NODE may be a word ("gpu").
void take_torchruns(const GetVariable& get, Engine& engine) {
  if (const auto nodes = get("PET_NNODES")) {
    const size_t colon = nodes->find(':');
    const auto least = nodes->substr(0, colon);
    engine.num_nodes = count_of(
        "PET_NNODES",
        colon == std::string::npos ? least : nodes->substr(colon + 1),
        count_of("PET_NNODES", least, 1));
    engine.nodes = *nodes;
  }
  if (const auto address = get("PET_MASTER_ADDR")) {
    engine.master_addr = *address;
  }
  if (get("PET_MASTER_PORT")) {
    engine.master_port = count_of(get, "PET_MASTER_PORT", 1);
  }
  const auto ranks = get("PET_NPROC_PER_NODE");
  if (ranks && ranks->find_first_not_of("0123456789") == std::string::npos) {
    engine.num_ranks = count_of("PET_NPROC_PER_NODE", *ranks, 1);
  }
}

/// "job-a-3" and 3 -> "job-a"; empty when the name has another end.
std::string without_index(const std::string& name, int index) {
  const std::string end = "-" + std::to_string(index);
  return name.ends_with(end) ? name.substr(0, name.size() - end.size()) : "";
}

/// "first.example.org" -> "first".
std::string first_label(const std::string& name) {
  return name.substr(0, name.find('.'));
}

Engine from_trainer(const GetVariable& get) {
  Engine engine{.kind = Engine::Kind::kubernetes};
  engine.node_rank = count_of(get, "PET_NODE_RANK", 0);
  take_torchruns(get, engine);
  // The trainer's pods are those of a JobSet: NAME-node-0-0.
  const std::string end = "-node-0-0";
  const std::string first = first_label(engine.master_addr);
  engine.job = first.ends_with(end)
                   ? "TrainJob " + first.substr(0, first.size() - end.size())
                   : "the job that PET_NODE_RANK belongs to";
  return engine;
}

Engine from_leader_worker_set(const GetVariable& get) {
  Engine engine{.kind = Engine::Kind::kubernetes};
  set_nodes(engine, count_of(get, "LWS_GROUP_SIZE", 1));
  engine.node_rank = count_of(get, "LWS_WORKER_INDEX", 0);
  engine.master_addr = text_of(get, "LWS_LEADER_ADDRESS");
  engine.job = "LeaderWorkerSet " + first_label(engine.master_addr);
  return engine;
}

Engine from_indexed_job(
    const GetVariable& get,
    const std::function<std::string()>& full_host_name) {
  Engine engine{.kind = Engine::Kind::kubernetes};
  engine.nodes.clear();
  engine.num_nodes = 0;
  engine.node_rank = count_of(get, "JOB_COMPLETION_INDEX", 0);
  const std::string host = full_host_name();
  const std::string name = without_index(first_label(host), engine.node_rank);
  engine.job = "Kubernetes job " + (name.empty() ? host : name);
  if (!name.empty()) {
    engine.master_addr = name + "-0" + host.substr(first_label(host).size());
  }
  take_torchruns(get, engine);
  return engine;
}

// One process a host is a job of launchers; several are not.
void take_ranks_as_hosts(const GetVariable& get, Engine& engine) {
  const RankEnvironment env = read_environment(get);
  set_nodes(engine, env.world_size);
  engine.node_rank = env.rank;
  engine.master_addr = env.master_addr;
  engine.master_port = env.master_port;
  const bool mpirun = engine.kind == Engine::Kind::mpirun;
  const char* hosts =
      mpirun ? "OMPI_MCA_orte_num_nodes" : "SLURM_STEP_NUM_NODES";
  const int num_hosts = get(hosts) ? count_of(get, hosts, 1) : env.world_size;
  if (env.local_world_size > 1 || num_hosts < env.world_size) {
    engine.problem = format(
        "{} has started {} launchers, and several of them on one host; let it "
        "start one a host, with {}, and the launcher starts the ranks (-n); or "
        "--nnodes 1, for jobs that have nothing to do with each other",
        engine.job, env.world_size,
        mpirun ? "mpirun --map-by ppr:1:node"
               : format("srun --ntasks={} --ntasks-per-node=1", num_hosts));
  }
}

// What is set where the job has GPUs.
int slurm_gpus(const GetVariable& get) {
  const auto gpus = get("SLURM_GPUS_ON_NODE");
  return gpus ? count_of("SLURM_GPUS_ON_NODE", *gpus, 0) : 0;
}

// Slurm says how many GPUs the job has, where it was asked for that: "6", or
// "h100:6"; and how many this node has. Empty: all nodes have as many.
std::string uneven_gpus(const GetVariable& get, int num_nodes) {
  const std::string asked = get("SLURM_GPUS").value_or("");
  const int here = slurm_gpus(get);
  const std::string number = asked.substr(asked.rfind(':') + 1);
  if (number.empty() || here == 0) return "";
  const int all = count_of("SLURM_GPUS", number, 0);
  if (all == here * num_nodes) return "";
  return format("{} GPUs on {} nodes, {} of them here", all, num_nodes, here);
}

Engine from_slurm_step(const GetVariable& get) {
  Engine engine{.kind = Engine::Kind::slurm_step};
  engine.job = "Slurm job " + get("SLURM_JOB_ID").value_or("?");
  take_ranks_as_hosts(get, engine);
  engine.num_ranks = slurm_gpus(get);
  // The number of GPUs is the job's, and a step may have fewer nodes.
  if (get("SLURM_JOB_NUM_NODES") == get("SLURM_STEP_NUM_NODES")) {
    engine.uneven = uneven_gpus(get, engine.num_nodes);
  }
  return engine;
}

Engine from_slurm_batch(const GetVariable& get) {
  Engine engine{.kind = Engine::Kind::slurm_batch};
  engine.job = "Slurm job " + text_of(get, "SLURM_JOB_ID");
  const char* nodes =
      get("SLURM_JOB_NUM_NODES") ? "SLURM_JOB_NUM_NODES" : "SLURM_NNODES";
  set_nodes(engine, get(nodes) ? count_of(get, nodes, 1) : 1);
  engine.num_ranks = slurm_gpus(get);
  // "4(x2)", or "4": the same on all nodes. Slurm says 1 where nobody asked.
  const std::string tasks = get("SLURM_TASKS_PER_NODE").value_or("");
  const std::string each = tasks.substr(0, tasks.find('('));
  if (tasks.find(',') != std::string::npos) {
    engine.uneven = tasks + " tasks on its nodes";
  } else if (!each.empty() && each != "1") {
    engine.num_ranks = count_of("SLURM_TASKS_PER_NODE", each, 1);
  } else {
    engine.uneven = uneven_gpus(get, engine.num_nodes);
  }
  return engine;
}

Engine from_mpirun(const GetVariable& get) {
  Engine engine{.kind = Engine::Kind::mpirun, .job = "mpirun"};
  take_ranks_as_hosts(get, engine);
  return engine;
}

std::optional<Engine> recognise(
    const GetVariable& get,
    const std::function<std::string()>& full_host_name) {
  if (get("RANK") || get("WORLD_SIZE")) return std::nullopt;
  if (get("OMPI_COMM_WORLD_RANK")) return from_mpirun(get);
  if (get("PET_NODE_RANK")) return from_trainer(get);
  if (get("LWS_WORKER_INDEX")) return from_leader_worker_set(get);
  if (get("JOB_COMPLETION_INDEX")) return from_indexed_job(get, full_host_name);
  if (get("SLURM_STEP_ID") && get("SLURM_PROCID")) return from_slurm_step(get);
  if (get("SLURM_JOB_ID")) return from_slurm_batch(get);
  return std::nullopt;
}

// /etc/hosts of a pod has its full name.
std::string own_full_name() {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  addrinfo hints{};
  hints.ai_flags = AI_CANONNAME;
  addrinfo* found = nullptr;
  if (getaddrinfo(name.data(), nullptr, &hints, &found) != 0) {
    return name.data();
  }
  std::string full =
      found->ai_canonname != nullptr ? found->ai_canonname : name.data();
  freeaddrinfo(found);
  return full.starts_with(name.data()) ? full : name.data();
}

}  // namespace

std::optional<Engine> find_engine(
    const GetVariable& get,
    const std::function<std::string()>& full_host_name) {
  auto engine = recognise(get, full_host_name);
  if (!engine) return std::nullopt;
  if (engine->num_nodes == 1 && engine->num_ranks == 0) return std::nullopt;
  if (engine->num_nodes == 1) engine->master_addr.clear();
  if (engine->num_nodes > 0 && engine->node_rank >= engine->num_nodes) {
    throw ConfigError(format(
        "environment: {} says that this is host {} (from 0) of {}", engine->job,
        engine->node_rank, engine->num_nodes));
  }
  if (const auto address = get("MASTER_ADDR")) engine->master_addr = *address;
  if (get("MASTER_PORT")) {
    engine->master_port = count_of(get, "MASTER_PORT", 1);
  }
  return engine;
}

std::optional<Engine> find_engine() {
  return find_engine(
      [](const char* name) -> std::optional<std::string> {
        const char* value = std::getenv(name);
        if (value == nullptr) return std::nullopt;
        return value;
      },
      own_full_name);
}

}  // namespace echelon::launch
