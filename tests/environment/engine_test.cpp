#include "echelon/environment/engine.h"

#include <gmock/gmock.h>

#include <iterator>
#include <map>
#include <sstream>

#include "tests/support/error_text.h"

namespace echelon::engine_test {

using launch::Engine;
using testing::HasSubstr;

/// The text is like "A=1 B=2"; `host` is this host's full name.
std::optional<Engine>
find(const std::string& text, const std::string& host = "host") {
  std::map<std::string, std::string> variables;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    variables[word.substr(0, equals)] = word.substr(equals + 1);
  }
  return launch::find_engine(
      [&](const char* name) -> std::optional<std::string> {
        const auto it = variables.find(name);
        if (it == variables.end()) return std::nullopt;
        return it->second;
      },
      [&] { return host; });
}

std::string
error_of(const std::string& text, const std::string& host = "host") {
  return error_text<ConfigError>([&] { find(text, host); });
}

/// "KIND JOB: NODE of NODES at ADDRESS:PORT, RANKS".
std::string words_of(const std::optional<Engine>& engine) {
  if (!engine) return "none";
  constexpr const char* kKinds[] = {
      "mpirun", "kubernetes", "slurm_step", "slurm_batch"};
  std::ostringstream text;
  text << kKinds[static_cast<int>(engine->kind)] << " " << engine->job << ": "
       << engine->node_rank << " of " << engine->nodes << " at "
       << engine->master_addr << ":" << engine->master_port << ", "
       << engine->num_ranks;
  return text.str();
}

const std::string kStep =
    "SLURM_JOB_ID=42 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NODEID=1 "
    "SLURM_LOCALID=0 SLURM_STEP_NODELIST=n[0-1] ";

TEST(Engine, IsNoneWithoutOne) {
  EXPECT_EQ(words_of(find("")), "none");
  EXPECT_EQ(words_of(find("HOME=/root")), "none");
}

TEST(Engine, IsNoneInARankOfAnotherLauncher) {
  EXPECT_EQ(
      words_of(find("RANK=0 WORLD_SIZE=2 SLURM_JOB_ID=42 SLURM_NNODES=2")),
      "none");
}

TEST(Engine, OneTaskANodeOfSlurmIsAHost) {
  const std::string step = kStep +
                           "SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2 "
                           "SLURM_STEP_TASKS_PER_NODE=1(x2) ";
  const auto engine = find(step + "SLURM_GPUS_ON_NODE=4");
  ASSERT_TRUE(engine);
  EXPECT_GT(engine->master_port, 1024);
  EXPECT_EQ(
      words_of(engine), "slurm_step Slurm job 42: 1 of 2 at n0:" +
                            std::to_string(engine->master_port) + ", 4");
  EXPECT_EQ(engine->problem, "");
  EXPECT_EQ(
      words_of(find(step + "MASTER_ADDR=head MASTER_PORT=7000")),
      "slurm_step Slurm job 42: 1 of 2 at head:7000, 0");
}

// The node that has one task sees it too.
TEST(Engine, SeveralTasksOnANodeAreNoJobOfLaunchers) {
  for (const char* node : {"SLURM_NODEID=0 ", "SLURM_NODEID=1 "}) {
    const auto engine = find(
        "SLURM_JOB_ID=42 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_LOCALID=0 "
        "SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=2 "
        "SLURM_STEP_TASKS_PER_NODE=3,1 SLURM_STEP_NODELIST=n[0-1] " +
        std::string(node));
    ASSERT_TRUE(engine) << node;
    EXPECT_THAT(
        engine->problem,
        HasAll(
            "Slurm job 42 has started 4 launchers",
            "srun --ntasks=2 --ntasks-per-node=1", "--nnodes 1"))
        << node;
  }
}

TEST(Engine, GpusMayBeUnevenOverTheNodes) {
  const std::string batch = "SLURM_JOB_ID=42 SLURM_JOB_NUM_NODES=2 ";
  const auto uneven = [](const std::string& variables) {
    return find(variables)->uneven;
  };
  EXPECT_EQ(
      uneven(batch + "SLURM_GPUS=h100:6 SLURM_GPUS_ON_NODE=4"),
      "6 GPUs on 2 nodes, 4 of them here");
  EXPECT_EQ(uneven(batch + "SLURM_GPUS=8 SLURM_GPUS_ON_NODE=4"), "");
  EXPECT_EQ(uneven(batch + "SLURM_GPUS=8"), "");
  const std::string step =
      kStep +
      "SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2 SLURM_GPUS=6 "
      "SLURM_STEP_TASKS_PER_NODE=1(x2) ";
  for (const char* here : {"4", "2"}) {
    EXPECT_EQ(
        uneven(step + "SLURM_JOB_NUM_NODES=2 SLURM_GPUS_ON_NODE=" + here),
        std::string("6 GPUs on 2 nodes, ") + here + " of them here");
  }
  EXPECT_EQ(uneven(step + "SLURM_JOB_NUM_NODES=4 SLURM_GPUS_ON_NODE=4"), "")
      << "the job has more nodes than the step";
}

TEST(Engine, ABatchScriptKnowsTheNodesOfItsJob) {
  const std::string batch =
      "SLURM_JOB_ID=42 SLURM_JOB_NUM_NODES=2 SLURM_PROCID=0 SLURM_NODEID=0 ";
  EXPECT_EQ(
      words_of(find(batch + "SLURM_TASKS_PER_NODE=4(x2)")),
      "slurm_batch Slurm job 42: 0 of 2 at :0, 4");
  EXPECT_EQ(
      words_of(find(batch + "SLURM_TASKS_PER_NODE=1(x2) SLURM_GPUS_ON_NODE=8")),
      "slurm_batch Slurm job 42: 0 of 2 at :0, 8");
  EXPECT_EQ(
      words_of(find(batch + "SLURM_TASKS_PER_NODE=3,1")),
      "slurm_batch Slurm job 42: 0 of 2 at :0, 0");
  EXPECT_EQ(
      find(batch + "SLURM_TASKS_PER_NODE=3,1")->uneven,
      "3,1 tasks on its nodes");
  EXPECT_EQ(find(batch + "SLURM_TASKS_PER_NODE=4(x2)")->uneven, "");
  EXPECT_EQ(
      words_of(find("SLURM_JOB_ID=42 SLURM_JOB_NUM_NODES=1 "
                    "SLURM_TASKS_PER_NODE=1")),
      "none");
}

TEST(Engine, OneProcessAHostOfMpirunIsAHost) {
  const std::string mpirun =
      "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 "
      "OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1 "
      "OMPI_MCA_orte_hnp_uri=9.0;tcp://10.0.0.7:4321 PMIX_NAMESPACE=123 "
      "OMPI_MCA_orte_num_nodes=";
  const auto engine = find(mpirun + "2 SLURM_JOB_ID=42 SLURM_NNODES=2");
  ASSERT_TRUE(engine);
  EXPECT_EQ(
      words_of(engine), "mpirun mpirun: 1 of 2 at 10.0.0.7:" +
                            std::to_string(engine->master_port) + ", 0");
  EXPECT_EQ(engine->problem, "");
  EXPECT_THAT(
      find(mpirun + "1")->problem, HasSubstr("mpirun --map-by ppr:1:node"));
}

TEST(Engine, ReadsKubeflowsTrainer) {
  const std::string pod =
      "PET_NNODES=4 PET_NODE_RANK=2 PET_MASTER_ADDR=llama-node-0-0.llama "
      "PET_MASTER_PORT=29500 JOB_COMPLETION_INDEX=2 ";
  EXPECT_EQ(
      words_of(find(pod + "PET_NPROC_PER_NODE=8")),
      "kubernetes TrainJob llama: 2 of 4 at llama-node-0-0.llama:29500, 8");
  EXPECT_EQ(find(pod + "PET_NPROC_PER_NODE=gpu")->num_ranks, 0);
}

TEST(Engine, ReadsALeaderWorkerSet) {
  EXPECT_EQ(
      words_of(find("LWS_GROUP_SIZE=3 LWS_WORKER_INDEX=1 "
                    "LWS_LEADER_ADDRESS=train-0.train.default")),
      "kubernetes LeaderWorkerSet train-0: 1 of 3 at "
      "train-0.train.default:0, 0");
}

TEST(Engine, ReadsTheFirstPodOfAnIndexedJobFromTheHostsName) {
  EXPECT_EQ(
      words_of(find(
          "JOB_COMPLETION_INDEX=2 PET_NNODES=3",
          "first-0-2.first.default.svc.cluster.local")),
      "kubernetes Kubernetes job first-0: 2 of 3 at "
      "first-0-0.first.default.svc.cluster.local:0, 0");
  EXPECT_EQ(
      words_of(find("JOB_COMPLETION_INDEX=1 PET_NNODES=1:4", "a-1")),
      "kubernetes Kubernetes job a: 1 of 1:4 at a-0:0, 0");
  EXPECT_EQ(
      words_of(find("JOB_COMPLETION_INDEX=1", "other")),
      "kubernetes Kubernetes job other: 1 of  at :0, 0");
}

TEST(Engine, NamesTheVariableThatIsWrong) {
  EXPECT_THAT(
      error_of("LWS_GROUP_SIZE=x LWS_WORKER_INDEX=0 LWS_LEADER_ADDRESS=a"),
      HasSubstr("LWS_GROUP_SIZE=\"x\" must be a whole number from 1"));
  EXPECT_THAT(
      error_of("LWS_WORKER_INDEX=0"), HasSubstr("LWS_GROUP_SIZE is not set"));
  EXPECT_THAT(
      error_of("PET_NODE_RANK=4 PET_NNODES=4 PET_MASTER_ADDR=a"),
      HasSubstr("says that this is host 4 (from 0) of 4"));
}

}  // namespace echelon::engine_test
