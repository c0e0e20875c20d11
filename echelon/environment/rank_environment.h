// Who this process is, from the variables of whatever launched it. Plain C++.
//
// | launcher            | recognised by        | what is taken               |
// | echelon, torchrun   | RANK, WORLD_SIZE     | + LOCAL_RANK,
// LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT | | mpirun (Open MPI)
// | OMPI_COMM_WORLD_RANK | + _SIZE, _LOCAL_RANK, _LOCAL_SIZE,
// OMPI_MCA_orte_hnp_uri, _local_daemon_uri | | srun (Slurm)        |
// SLURM_STEP_ID, SLURM_PROCID | + SLURM_NTASKS or SLURM_STEP_NUM_TASKS,
// SLURM_LOCALID, SLURM_NODEID, SLURM_STEP_NODELIST |
//
// MASTER_ADDR and MASTER_PORT, when set, win over what srun and mpirun imply.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace echelon {

struct RankEnvironment {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 1;
  int node_rank = 0;
  std::string master_addr = "127.0.0.1";
  int master_port = 0;
  std::optional<int> master_fd;   // a listening socket inherited by rank 0
  bool store_is_served = false;   // torchrun's agent serves the store itself
  std::string job = "job";        // names the job in keys
  int generation = 0;             // how often the job was restarted
  std::string launcher = "none";  // "echelon", "torchrun", "srun", "mpirun"
};

using GetVariable = std::function<std::optional<std::string>(const char*)>;

/// Throws ConfigError, naming the variable and its value, for numbers that are
/// none, ranks out of range and variables that are missing from a set.
RankEnvironment read_environment(const GetVariable& get);
/// The same from this process' environment.
RankEnvironment read_environment();

/// Threads for what this rank computes, 1 or more. `available`: cores that its
/// process may use; `online`: of the host. srun and mpirun may have bound each
/// rank to cores of its own, elsewhere the ranks of a host share the same ones.
int threads_of_rank(const RankEnvironment& env, int available, int online);

}  // namespace echelon
