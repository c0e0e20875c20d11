// What `echelon deploy` and `echelon submit` have in common: a job in the terms
// of another engine.
#pragma once

#include <string>

#include "echelon/cli/arguments.h"
#include "echelon/deploy/deploy.h"

namespace echelon::cli {

struct DeployArguments {
  JobArguments job;
  std::string engine;
  std::string num_nodes;  // as written: "4", "2:4"; empty: 1, or of --hosts
  std::string gpus_per_node;
  std::string cpus_per_node;
  std::string memory;
  std::string hosts;  // of ssh, separated by commas
  std::string cluster;
  std::string save_seconds;
  std::string upload_seconds;
  std::string max_restarts;
  std::string metrics_port;
  std::string pool;
  bool new_token = false;
  deploy::Settings settings;
};

/// Adds CONFIG and every option that says what the engine is given.
void add_deploy_arguments(Command& command, DeployArguments& arguments);

struct Deployed {
  deploy::Engine engine;
  deploy::Workload workload;
  deploy::Settings settings;
  std::string text;  // the script or the manifests
};

/// Loads, checks and plans the job, and writes it for the engine. Prints
/// warnings to stderr. Throws ConfigError and DataError as train does, and for
/// what the engine would refuse.
Deployed deployed(const DeployArguments& arguments);

/// The path of a program in PATH; empty: there is none.
std::string in_path(const std::string& program);

}  // namespace echelon::cli
