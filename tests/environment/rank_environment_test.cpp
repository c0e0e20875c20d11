#include "echelon/environment/rank_environment.h"

#include <gmock/gmock.h>

#include <iterator>
#include <map>
#include <sstream>

#include "tests/support/error_text.h"

namespace echelon::rank_environment_test {

using launch::JobPlace;
using launch::random_job_id;
using launch::rank_environment;
using launch::RankPlace;
using testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

// Each entry is "NAME=value".
Variables as_map(const std::vector<std::string>& entries) {
  Variables variables;
  for (const auto& entry : entries) {
    const size_t equals = entry.find('=');
    const auto [at, is_new] =
        variables.emplace(entry.substr(0, equals), entry.substr(equals + 1));
    EXPECT_TRUE(is_new) << entry;
  }
  return variables;
}

// The text is like "RANK=0 WORLD_SIZE=2".
Variables parsed(const std::string& text) {
  std::istringstream words(text);
  return as_map({std::istream_iterator<std::string>(words), {}});
}

RankEnvironment read(const Variables& variables) {
  return read_environment([&](const char* name) -> std::optional<std::string> {
    const auto it = variables.find(name);
    if (it == variables.end()) return std::nullopt;
    return it->second;
  });
}

RankEnvironment read(const std::string& variables) {
  return read(parsed(variables));
}

std::string error_of(const std::string& variables) {
  return error_text<ConfigError>([&] { read(variables); });
}

TEST(Environment, WithoutALauncherThereIsOneRank) {
  const auto env = read("");
  EXPECT_EQ(env.rank, 0);
  EXPECT_EQ(env.world_size, 1);
  EXPECT_EQ(env.launcher, Launcher::none);
  EXPECT_EQ(to_string(Launcher::none), "none");
  EXPECT_EQ(to_string(Launcher::threads), "threads");
}

TEST(Environment, ReadsTorchrun) {
  const auto env = read(
      "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 "
      "GROUP_RANK=1 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 "
      "TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RUN_ID=abc "
      "TORCHELASTIC_RESTART_COUNT=2");
  EXPECT_EQ(env.rank, 5);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.node_rank, 1);
  EXPECT_EQ(env.master_addr, "10.0.0.1");
  EXPECT_EQ(env.master_port, 29500);
  EXPECT_TRUE(env.store_is_served);
  EXPECT_EQ(env.job, "abc");
  EXPECT_EQ(env.generation, 2);
  EXPECT_EQ(env.launcher, Launcher::torchrun);
}

TEST(Environment, ReadsEchelonsLauncher) {
  const auto env = read(
      "RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1234 "
      "ECHELON_JOB=j1 ECHELON_GENERATION=3 ECHELON_MASTER_FD=7");
  EXPECT_EQ(env.launcher, Launcher::echelon);
  EXPECT_EQ(env.master_fd, 7);
  EXPECT_EQ(env.generation, 3);
  EXPECT_EQ(env.job, "j1");
}

TEST(Environment, MapsMpirun) {
  // NODE_RANK is the rank among this host's ranks.
  const Variables one_host = parsed(
      "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 "
      "OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
      "PMIX_NAMESPACE=123 OMPI_COMM_WORLD_NODE_RANK=1 "
      "OMPI_MCA_orte_local_daemon_uri=9.0;tcp://10.0.0.7:4321 "
      "OMPI_MCA_orte_hnp_uri=9.0;tcp://10.0.0.7,10.1.0.7:4321");
  EXPECT_EQ(read(one_host).node_rank, 0);
  EXPECT_EQ(read(one_host).master_addr, "127.0.0.1");
  EXPECT_EQ(read(one_host).rank, 1);
  Variables test_hosts = one_host;
  test_hosts["OMPI_COMM_WORLD_SIZE"] = "4";
  EXPECT_EQ(read(test_hosts).master_addr, "10.0.0.7");
  EXPECT_EQ(read(test_hosts).master_port, read(one_host).master_port);
  test_hosts["OMPI_MCA_orte_local_daemon_uri"] = "9.1;tcp://10.0.0.8:4321";
  EXPECT_EQ(read(test_hosts).node_rank, 1);
  test_hosts["MASTER_ADDR"] = "head";
  EXPECT_EQ(read(test_hosts).master_addr, "head");
}

// Linux gives the ports from 32768 on to outgoing connections.
TEST(Environment, PortsOfJobsAreNoOutgoingConnections) {
  for (int job = 1; job <= 1000; ++job) {
    const auto env = read(
        "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 PMIX_NAMESPACE=" +
        std::to_string(job));
    EXPECT_GE(env.master_port, 1024);
    EXPECT_LT(env.master_port, 32768);
  }
}

TEST(Environment, MapsSrun) {
  const auto env = read(
      "SLURM_PROCID=3 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=4 "
      "SLURM_NTASKS=9 SLURM_LOCALID=1 SLURM_NODEID=1 "
      "SLURM_STEP_NUM_NODES=2 SLURM_JOB_ID=77 "
      "SLURM_STEP_NODELIST=node[03-04,9]");
  EXPECT_EQ(env.rank, 3);
  EXPECT_EQ(env.world_size, 4);
  EXPECT_EQ(env.local_world_size, 2);
  EXPECT_EQ(env.master_addr, "node03");
  EXPECT_GT(env.master_port, 1024);
}

// srun -N2 -n4 may give one node three tasks.
TEST(Environment, NodesOfSrunMayHaveDifferentNumbersOfTasks) {
  const auto tasks = [](const std::string& list, int node, int rank) {
    Variables variables = parsed(
        "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=12 SLURM_STEP_NUM_NODES=4 "
        "SLURM_STEP_NODELIST=n[0-3] SLURM_NTASKS_PER_NODE=3");
    variables["SLURM_STEP_TASKS_PER_NODE"] = list;
    variables["SLURM_NODEID"] = std::to_string(node);
    variables["SLURM_PROCID"] = std::to_string(rank);
    return read(variables).local_world_size;
  };
  EXPECT_EQ(tasks("4(x2),3,1", 0, 0), 4);
  EXPECT_EQ(tasks("4(x2),3,1", 1, 4), 4);
  EXPECT_EQ(tasks("4(x2),3,1", 2, 8), 3);
  EXPECT_EQ(tasks("4(x2),3,1", 3, 11), 1);
  EXPECT_EQ(tasks("6(x2)", 1, 7), 6);
  for (const char* wrong :
       {"3(x", "3(x-1)", "1(x99999999999),2", "9999999999"}) {
    EXPECT_EQ(tasks(wrong, 1, 3), 3) << "as SLURM_NTASKS_PER_NODE says";
  }
}

TEST(Environment, NamesTheVariableThatIsWrong) {
  EXPECT_THAT(error_of("RANK=x WORLD_SIZE=2"), HasSubstr("RANK=\"x\""));
  EXPECT_THAT(error_of("RANK=0"), HasSubstr("WORLD_SIZE is not set"));
  EXPECT_THAT(
      error_of("RANK=2 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1"),
      HasSubstr("RANK=2 must be below 2"));
  EXPECT_THAT(
      error_of("RANK=0 WORLD_SIZE=2"), HasSubstr("MASTER_ADDR is not set"));
  EXPECT_THAT(error_of("RANK=-1 WORLD_SIZE=2"), HasSubstr("0 or more"));
  EXPECT_THAT(
      error_of("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=70000"),
      HasSubstr("65536"));
}

TEST(Environment, RanksShareTheCoresThatTheyMayUse) {
  RankEnvironment env;
  EXPECT_EQ(threads_of_rank(env, 8, 64), 8);
  env.local_world_size = 4;
  for (const auto sharing :
       {Launcher::none, Launcher::echelon, Launcher::torchrun,
        Launcher::threads}) {
    env.launcher = sharing;
    EXPECT_EQ(threads_of_rank(env, 8, 64), 2) << to_string(sharing);
    EXPECT_EQ(threads_of_rank(env, 3, 64), 1) << to_string(sharing);
  }
  for (const auto binding : {Launcher::srun, Launcher::mpirun}) {
    env.launcher = binding;
    EXPECT_EQ(threads_of_rank(env, 16, 64), 16)
        << to_string(binding);  // of its own
    EXPECT_EQ(threads_of_rank(env, 64, 64), 16)
        << to_string(binding);  // bound to none
    EXPECT_EQ(threads_of_rank(env, 1, 2), 1) << to_string(binding);
  }
}

TEST(RankEnvironment, UsesTorchrunsNames) {
  const RankPlace place{
      .rank = 5,
      .local_rank = 1,
      .world_size = 8,
      .local_world_size = 4,
      .node_rank = 1,
      .num_nodes = 2};
  const JobPlace job{
      .job = "abc",
      .generation = 3,
      .master_addr = "10.0.0.1",
      .master_port = 29500,
      .node_address = "10.0.0.2",
      .store_key = "12ab"};
  const auto env = as_map(rank_environment(
      {"HOME=/h", "RANK=9"}, place, job, {"/e.json", -1}, {}, 8));
  const Variables expected = parsed(
      "HOME=/h RANK=5 LOCAL_RANK=1 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4 "
      "GROUP_RANK=1 GROUP_WORLD_SIZE=2 ROLE_RANK=5 "
      "ROLE_WORLD_SIZE=8 ROLE_NAME=default MASTER_ADDR=10.0.0.1 "
      "MASTER_PORT=29500 TORCHELASTIC_RUN_ID=abc "
      "TORCHELASTIC_RESTART_COUNT=3 TORCHELASTIC_MAX_RESTARTS=0 "
      "TORCHELASTIC_USE_AGENT_STORE=False OMP_NUM_THREADS=2 "
      "ECHELON_JOB=abc ECHELON_GENERATION=3 "
      "ECHELON_ERROR_FILE=/e.json ECHELON_NODE_ADDRESS=10.0.0.2 "
      "ECHELON_STORE_KEY=12ab");
  EXPECT_EQ(env, expected);
}

TEST(RankEnvironment, ThreadsAreAtLeastOneUnlessTheUserSetsThem) {
  const RankPlace four{.world_size = 4, .local_world_size = 4};
  EXPECT_EQ(
      as_map(rank_environment({}, four, {}, {}, {}, 2))["OMP_NUM_THREADS"],
      "1");
  EXPECT_EQ(
      as_map(rank_environment(
          {"OMP_NUM_THREADS=7"}, four, {}, {}, {}, 2))["OMP_NUM_THREADS"],
      "7");
}

TEST(RankEnvironment, AnOuterJobsFilesAreRemoved) {
  const auto env = as_map(rank_environment(
      {"ECHELON_MASTER_FD=3", "ECHELON_ERROR_FILE=/old",
       "ECHELON_NODE_ADDRESS=1.2.3.4", "ECHELON_MEMORY=/proc/1/fd/3",
       "ECHELON_PROGRESS=/proc/1/fd/4", "ECHELON_STORE_KEY=12ab",
       "ECHELON_TOKEN=34cd"},
      {}, {}, {}, {}, 1));
  EXPECT_FALSE(env.contains("ECHELON_MASTER_FD"));
  EXPECT_FALSE(env.contains("ECHELON_ERROR_FILE"));
  EXPECT_FALSE(env.contains("ECHELON_NODE_ADDRESS"));
  EXPECT_FALSE(env.contains("ECHELON_MEMORY"));
  EXPECT_FALSE(env.contains("ECHELON_PROGRESS"));
  EXPECT_FALSE(env.contains("ECHELON_STORE_KEY"));
  EXPECT_FALSE(env.contains("ECHELON_TOKEN"));
}

TEST(RankEnvironment, ExtraVariablesWin) {
  EXPECT_EQ(
      as_map(rank_environment(
          {}, {}, {}, {"", 7}, {{"ECHELON_MASTER_FD", "8"}},
          1))["ECHELON_MASTER_FD"],
      "8");
}

TEST(RandomJobId, Differs) {
  EXPECT_EQ(random_job_id().size(), 16u);
  EXPECT_NE(random_job_id(), random_job_id());
}

}  // namespace echelon::rank_environment_test
