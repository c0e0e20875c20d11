// The rank of this process, from the variables of the launcher that started it.
// Plain C++.
//
//   echelon, torchrun  by RANK or WORLD_SIZE; also reads LOCAL_RANK,
//                      LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT
//   mpirun (Open MPI)  by OMPI_COMM_WORLD_RANK; also reads its _SIZE,
//                      _LOCAL_RANK and _LOCAL_SIZE, OMPI_MCA_orte_hnp_uri and
//                      OMPI_MCA_orte_local_daemon_uri
//   srun (Slurm)       by SLURM_STEP_ID and SLURM_PROCID; also reads
//                      SLURM_NTASKS or SLURM_STEP_NUM_TASKS, SLURM_LOCALID,
//                      SLURM_NODEID, SLURM_STEP_NODELIST
//
// MASTER_ADDR and MASTER_PORT, when set, win over the values that srun and
// mpirun imply.
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

/// Throws ConfigError, with the variable and its value, for malformed numbers,
/// ranks out of range, and variables that are missing from a set.
RankEnvironment read_environment(const GetVariable& get);
/// The same, from this process's environment.
RankEnvironment read_environment();

/// Threads for this rank's computation, 1 or more. `available`: the cores that
/// its process may use; `online`: the host's cores. srun and mpirun may have
/// bound each rank to cores of its own; under other launchers the ranks of a
/// host share the same cores.
int threads_of_rank(const RankEnvironment& env, int available, int online);

}  // namespace echelon
