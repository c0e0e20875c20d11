// The variables that tell a process its rank: how our launcher sets them, and
// how a process reads those of the launcher that started it. Plain C++.
//
// Our launcher sets torchrun's names, and Echelon's own:
//
//   RANK WORLD_SIZE               over all hosts
//   LOCAL_RANK LOCAL_WORLD_SIZE   on this host
//   GROUP_RANK GROUP_WORLD_SIZE   this host's number, and the number of hosts
//   ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME
//   MASTER_ADDR MASTER_PORT       the address of rank 0's store
//   TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS
//   TORCHELASTIC_USE_AGENT_STORE  False: rank 0 serves the store, not the
//                                 launcher
//   OMP_NUM_THREADS               cores / ranks of this host, unless set
//   ECHELON_JOB                   random, the same on every rank of one job
//   ECHELON_GENERATION            how often the job was restarted
//   ECHELON_ERROR_FILE            this rank's error report (error_report.h)
//   ECHELON_MASTER_FD             rank 0 alone: a TCP socket bound to
//                                 MASTER_ADDR, MASTER_PORT. listen() on it and
//                                 do not bind another: nobody else can take the
//                                 port
//   ECHELON_STORE_KEY             the key of rank 0's store: secret, the same
//   on
//                                 all ranks of a job. ECHELON_TOKEN, the
//                                 launchers' own, is not for ranks
//   ECHELON_NODE_ADDRESS          several hosts: this host's address, as the
//                                 others reach it
//   ECHELON_MEMORY                `echelon train`: where checkpoints in memory
//                                 are (checkpoint/memory)
//   ECHELON_PROGRESS              where the ranks of this host show their
//                                 progress (comm/trace/progress.h)
//
// A process reads the variables of one of these launchers:
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
#include <utility>
#include <vector>

namespace echelon {

/// What started this rank. `threads`: it is a thread of its program.
enum class Launcher { none, echelon, torchrun, mpirun, srun, threads };

/// "none", "echelon", …
std::string to_string(Launcher launcher);

struct RankEnvironment {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 1;
  int node_rank = 0;
  std::string master_addr = "127.0.0.1";
  int master_port = 0;
  std::optional<int> master_fd;  // a listening socket inherited by rank 0
  bool store_is_served = false;  // torchrun's agent serves the store itself
  std::string store_key;         // of the store; empty: other launchers
  std::string job = "job";       // names the job in keys
  int generation = 0;            // how often the job was restarted
  std::string memory;            // where checkpoints in memory are; empty: none
  std::string progress;          // where to show it; empty: nowhere
  Launcher launcher = Launcher::none;
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

namespace echelon::launch {

/// The place of one rank in the job.
struct RankPlace {
  int rank = 0;
  int local_rank = 0;
  int world_size = 1;
  int local_world_size = 1;
  int node_rank = 0;
  int num_nodes = 1;
};

/// The values that all ranks of a job share.
struct JobPlace {
  std::string job;  // random
  int generation = 0;
  int max_restarts = 0;
  std::string master_addr;
  int master_port = 0;
  std::string node_address;  // empty on one host
  std::string store_key;     // hexadecimal
};

/// The files of one rank alone; -1 and empty leave the variable out.
struct RankFiles {
  std::string error_file;
  int master_fd = -1;
};

using Variables = std::vector<std::pair<std::string, std::string>>;

/// `base` ("NAME=value" each) with the variables above set and `extra` on top.
/// OMP_NUM_THREADS becomes max(1, cores / local_world_size) when unset.
std::vector<std::string> rank_environment(
    const std::vector<std::string>& base, const RankPlace& place,
    const JobPlace& job, const RankFiles& files, const Variables& extra,
    int cores);

/// 16 random hexadecimal digits.
std::string random_job_id();

}  // namespace echelon::launch
