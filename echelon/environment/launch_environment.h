// The variables that tell a rank its place: torchrun's names, and Echelon's
// own.
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
//   ECHELON_NODE_ADDRESS          several hosts: this host's address, as the
//                                 others reach it
#pragma once

#include <string>
#include <utility>
#include <vector>

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
  std::string master_addr;
  int master_port = 0;
  std::string node_address;  // empty on one host
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
