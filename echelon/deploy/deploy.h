// What starts a job on another engine: a script for Slurm, manifests for
// Kubernetes. All of it is text, made from the job's plan; nothing is sent.
//
//   const Workload workload = …;  // of the job, by the command line
//   std::cout << deployment(Engine::slurm, workload, {.name = "first"});
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace echelon::deploy {

enum class Engine { slurm, jobset, kueue, kai, trainer, lws, ray, ssh };

/// In the order of the enum: "slurm", "jobset", …
const std::vector<std::string>& engine_names();
/// Throws ConfigError, with the nearest name, for any other text.
Engine engine_from_name(const std::string& name);
std::string to_string(Engine engine);
/// Whether it takes manifests of Kubernetes.
bool is_kubernetes(Engine engine);

/// A project of a pool, in the words of Kueue's and KAI's queues.
struct Project {
  std::string name;        // a label of DNS
  int64_t guaranteed = 0;  // devices
  double weight = 1;       // of its share of what others leave
  int64_t limit = -1;      // the most that it may have; -1: none
  std::string parent;      // the project that it is a part of; may be empty
};

/// What a job is and needs, from its configuration and plan.
struct Workload {
  std::string file;           // of the configuration, as the user named it
  std::string configuration;  // its text
  /// Options of `echelon train` that the user gave: {"--set", "train.steps=9"}
  std::vector<std::string> options;
  std::string layout;  // "fsdp=8,tp=2"
  std::string run;     // the run's folder
  bool saves = true;   // it writes checkpoints, which all hosts must see
  std::string remote;  // its checkpoints' object storage; empty: none
  bool object_storage = false;  // checkpoints, data or weights are on some
  int64_t hosts = 1;            // at most
  int64_t least_hosts = 0;  // above 0: hosts come and go, and so few suffice
  /// The fewest of them for which a layout fits; `least_hosts` or more.
  int64_t fewest_that_fit = 0;
  int64_t ranks_per_host = 1;
  bool gpus = false;  // a GPU for each rank; otherwise a core
  /// From the first to the last of the ranks that share a layer.
  int64_t tp_span = 1;
  int64_t cores_per_host = 1;
  int64_t memory_bytes = 0;  // of each host
  std::string memory_parts;  // what they are for, a sentence
  /// From the order to stop until all has been saved and all ranks have ended.
  int64_t grace_seconds = 30;
  std::string grace_parts;  // where they come from, a sentence
  int64_t max_restarts = 3;

  bool elastic() const { return least_hosts > 0; }
  /// The hosts of a group of tensor parallelism.
  int64_t hosts_of_tp() const {
    return (tp_span + ranks_per_host - 1) / ranks_per_host;
  }
};

/// What the user says about the engine. Empty: not said.
struct Settings {
  std::string name;  // of the job
  std::string image;
  std::string name_space;
  std::string queue;
  std::string account, partition, qos;
  std::string time_limit;          // as Slurm writes it: "1-12:00:00"
  std::string volume;              // a claim, or a folder that all hosts have
  std::string mount = "/work";     // where a claim appears
  std::string topology;            // the label of nodes in one NVLink domain
  std::string gpu_type;            // "h100"
  std::vector<std::string> nodes;  // of ssh
  std::string token;  // 64 hexadecimal digits for a Secret; empty: it exists
  int64_t metrics_port = 0;       // 0: no PodMonitor
  std::vector<Project> projects;  // whose queues are to be made
};

/// A name for the job of a configuration: "My first.toml" -> "my-first".
std::string name_of(const std::string& file);

/// The script or the manifests. Throws ConfigError, with the rule and a way
/// out, for settings that the engine does not have or that it would refuse:
/// names above all.
std::string
deployment(Engine engine, const Workload& workload, const Settings& settings);

/// What the published schemas of the engine and of Kubernetes say about the
/// fields of the manifests.
struct SchemaCheck {
  std::vector<std::string> sources;   // "kubernetes-sigs/jobset v0.12.0"
  std::vector<std::string> problems;  // "JobSet first: spec.suspend: is 1, …"
};
/// For an engine that is_kubernetes(). Throws as deployment() does.
SchemaCheck check_schemas(
    Engine engine, const Workload& workload, const Settings& settings);

/// The command that sends it when it is in `file`.
std::string
send_command(Engine engine, const Settings& settings, const std::string& file);

/// The command that asks it while it runs.
std::string
ask_command(Engine engine, const Workload& workload, const Settings& settings);

/// A secret that the job needs and that is not in its manifests.
struct NeededSecret {
  std::string name;
  std::string command;  // which makes it
};
std::vector<NeededSecret> needed_secrets(
    Engine engine, const Workload& workload, const Settings& settings);

}  // namespace echelon::deploy
