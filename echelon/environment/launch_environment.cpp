#include "echelon/environment/launch_environment.h"

#include <algorithm>
#include <map>
#include <random>

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
       {"ECHELON_MASTER_FD", "ECHELON_ERROR_FILE", "ECHELON_NODE_ADDRESS"}) {
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
  variables["ROLE_NAME"] = std::string("default");
  variables["MASTER_ADDR"] = job.master_addr;
  variables["MASTER_PORT"] = number(job.master_port);
  variables["TORCHELASTIC_RUN_ID"] = job.job;
  variables["TORCHELASTIC_RESTART_COUNT"] = number(job.generation);
  variables["TORCHELASTIC_MAX_RESTARTS"] = std::string("0");
  variables["TORCHELASTIC_USE_AGENT_STORE"] = std::string("False");
  variables["ECHELON_JOB"] = job.job;
  variables["ECHELON_GENERATION"] = number(job.generation);
  if (!job.node_address.empty()) {
    variables["ECHELON_NODE_ADDRESS"] = job.node_address;
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
