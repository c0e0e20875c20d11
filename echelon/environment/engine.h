// What has started this launcher on each host of a job, and so knows the hosts.
// Plain C++.
//
// A launcher reads the variables of the first of these that has set any. It
// reads none of them in a rank of another launcher, where RANK or WORLD_SIZE is
// set.
//
//   mpirun (Open MPI)    one process a host: as rank_environment.h, for ranks
//   Kubeflow trainer     PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR,
//                        PET_MASTER_PORT, PET_NPROC_PER_NODE
//   LeaderWorkerSet      LWS_GROUP_SIZE, LWS_WORKER_INDEX, LWS_LEADER_ADDRESS
//   Indexed Job, JobSet  JOB_COMPLETION_INDEX, which is also the end of the
//                        host's name (the first pod's ends with 0). They do not
//                        say how many pods there are: PET_NNODES, of the
//                        manifest, does
//   srun (Slurm)         one task a node: as rank_environment.h, for ranks
//   a batch script of    SLURM_JOB_ID, SLURM_JOB_NUM_NODES,
//   SLURM_TASKS_PER_NODE Slurm, or salloc
//
// SLURM_GPUS_ON_NODE is the number of ranks under Slurm. MASTER_ADDR and
// MASTER_PORT, when set, win over what an engine implies.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "echelon/environment/rank_environment.h"

namespace echelon::launch {

struct Engine {
  enum class Kind { mpirun, kubernetes, slurm_step, slurm_batch };
  Kind kind = Kind::mpirun;
  std::string job;          // as messages name it: "Slurm job 42"
  std::string nodes = "1";  // "2", or "1:4" where hosts may come and go; empty:
                            // it does not say
  int num_nodes = 1;        // the most of them; 0: it does not say
  int node_rank = 0;        // of this host
  std::string master_addr;  // of node 0; empty on one host, and where the
                            // engine does not say
  int master_port = 0;      // 0: the launcher's default
  int num_ranks = 0;        // of each host; 0: it does not say
  std::string uneven;       // where hosts would have other numbers: "3,1 tasks
                            // on its nodes"
  /// Why launchers that it has started so cannot be a job; empty: they can.
  std::string problem;
};

/// Nothing when no engine has started this process, or when it runs on one host
/// and says nothing else.
///
///   full_host_name  of this host, with its domain
///
/// Throws ConfigError, with the variable and its value, for malformed ones.
std::optional<Engine> find_engine(
    const GetVariable& get, const std::function<std::string()>& full_host_name);
/// The same, from this process's environment and its host.
std::optional<Engine> find_engine();

}  // namespace echelon::launch
