// Jobs of a real Slurm of two nodes: ranks that srun starts, launchers that
// srun or a batch script starts, jobs that are queued again, and lost nodes.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/stat.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/error_text.h"
#include "tests/support/places.h"
#include "tests/support/test_slurm.h"

namespace echelon::slurm_test {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;
using testing::UnorderedElementsAre;
using testing_support::Command;
using testing_support::read_file;
using testing_support::SlurmOptions;
using testing_support::TestSlurm;
using Words = std::vector<std::string>;

Words lines_of(const std::string& text) {
  Words lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

const std::string kRun = program("echelon") + " run --no-prefix ";
const std::string kPlace =
    " -- sh -c 'echo $RANK of $WORLD_SIZE on $SLURMD_NODENAME'";

class Slurm : public testing::Test {
 protected:
  explicit Slurm(const SlurmOptions& options = {}) : slurm_(options) {}
  void SetUp() override {
    if (!slurm_.reason().empty()) GTEST_SKIP() << slurm_.reason();
  }
  /// A shell's words as a command on the first node.
  Words shell(const std::string& text) const {
    return slurm_.on_first({"sh", "-c", text});
  }
  std::string out() const { return read_file(slurm_.folder() + "/out"); }
  bool until_out(const std::string& text) const {
    return Command::until(
        [&] { return out().find(text) != std::string::npos; });
  }
  TestSlurm slurm_;
};

/// Those that train.
class SlurmTraining : public Slurm {
 protected:
  using Slurm::Slurm;
  void SetUp() override {
    if (!fs::exists(program("echelon-train"))) {
      GTEST_SKIP() << "needs LibTorch: build with ECHELON_LIBTORCH";
    }
    Slurm::SetUp();
  }
  std::string run() const { return slurm_.folder() + "/run"; }
  /// Of the digits, which take long for so many steps.
  std::string train(
      const std::string& more, const std::string& steps,
      const std::string& name = "run") const {
    return program("echelon") + " train " +
           source_path("examples/configs/digits.toml") +
           " --set train.run=" + slurm_.folder() + "/" + name +
           " --set train.epochs=0 --set train.steps=" + steps +
           " --set optimizer.warmup_steps=0 " + more;
  }
  int steps_done(const std::string& name = "run") const {
    return testing_support::count(
        read_file(slurm_.folder() + "/" + name + "/metrics.jsonl"), "\"step\"");
  }
  /// The newest one's number.
  int last_step(const std::string& name = "run") const {
    const std::string text =
        read_file(slurm_.folder() + "/" + name + "/metrics.jsonl");
    const std::string key = "\"step\":";
    const size_t at = text.rfind(key);
    return at == std::string::npos ? 0 : std::atoi(&text[at + key.size()]);
  }
  bool until_steps(int number) const {
    return Command::until([&] { return steps_done() >= number; });
  }
  /// The process of a step's rank 0, whose program is echelon-train; -1: none.
  static pid_t first_rank(const Command& step) {
    for (const pid_t pid : step.living()) {
      const std::string folder = "/proc/" + std::to_string(pid);
      if (read_file(folder + "/comm") == "echelon-train\n" &&
          read_file(folder + "/environ")
                  .find(std::string("SLURM_PROCID=0\0", 15)) !=
              std::string::npos) {
        return pid;
      }
    }
    return -1;
  }
  /// The newest checkpoint's step.
  int saved_step() const {
    int newest = -1;
    for (const auto& entry : fs::directory_iterator(run() + "/checkpoints")) {
      const std::string name = entry.path().filename();
      if (name.starts_with("step-") && name.size() == 13) {
        newest = std::max(newest, std::stoi(name.substr(5)));
      }
    }
    return newest;
  }
};

TEST_F(Slurm, LaunchersOfAStepAreTheHostsOfAJob) {
  Command job(shell("srun -N2 --ntasks-per-node=1 " + kRun + "-n 2" + kPlace));
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(
      lines_of(job.out()),
      UnorderedElementsAre(
          "0 of 4 on n0", "1 of 4 on n0", "2 of 4 on n1", "3 of 4 on n1"));
  EXPECT_THAT(
      job.err(), HasAll(
                     "echelon: host 1 of 2 of Slurm job ",
                     "echelon: host 2 of "
                     "2 of Slurm job ",
                     ", master n0:"));
}

TEST_F(Slurm, ABatchScriptStartsTheLaunchersOfItsNodes) {
  const std::string job = slurm_.submit(
      // There is no GPU here: a step that asks for one for each task fails.
      "export SLURM_GPUS_PER_TASK=1\n"
      "unset ECHELON_TOKEN\nexport HOME=$PWD XDG_CONFIG_HOME=$PWD/own\n" +
          kRun + kPlace,
      {"-N2", "--ntasks-per-node=2"});
  ASSERT_TRUE(slurm_.until_state(job, "COMPLETED")) << out();
  EXPECT_THAT(
      out(), HasAll(
                 "0 of 4 on n0\n", "1 of 4 on n0\n", "2 of 4 on n1\n",
                 "3 of 4 on n1\n", "2 ranks a host, as Slurm job " + job,
                 "host 2 of 2 of Slurm job " + job + ", master n0:"));
  EXPECT_FALSE(fs::exists(slurm_.folder() + "/own")) << "a token of the user's";
  EXPECT_THAT(out(), Not(testing::ContainsRegex("[0-9a-f]{64}")));
}

// A step has as many tasks as its job, unless it says how many.
TEST_F(Slurm, ABatchScriptMayStartThemItself) {
  const std::string job = slurm_.submit(
      "srun --ntasks=$SLURM_JOB_NUM_NODES --ntasks-per-node=1 " + kRun +
          "-n 1" + kPlace,
      {"-N2", "--ntasks-per-node=2"});
  ASSERT_TRUE(slurm_.until_state(job, "COMPLETED")) << out();
  EXPECT_THAT(out(), HasAll("0 of 2 on n0\n", "1 of 2 on n1\n"));
}

// Where the cluster's own configuration does not do it. 9 has no meaning there.
TEST_F(Slurm, AScriptMayQueueItsJobAgain) {
  const std::string job = slurm_.submit(
      "if [ ${SLURM_RESTART_COUNT:-0} -gt 0 ]; then echo again; exit 0; fi\n" +
          kRun + "-- sh -c 'exit 9'\n" +
          "code=$?\n"
          "[ $code != 9 ] || scontrol requeue $SLURM_JOB_ID\n"
          "exit $code\n",
      {"-N2"});
  ASSERT_TRUE(slurm_.until_state(job, "COMPLETED")) << out();
  EXPECT_THAT(out(), HasSubstr("again\n"));
}

TEST_F(Slurm, SeveralLaunchersOnANodeAreRefused) {
  Command job(shell("srun -N1 -n2 " + kRun + kPlace));
  EXPECT_EQ(job.wait(), 2) << job.err();
  EXPECT_THAT(
      job.err(),
      HasAll("has started 2 launchers", "srun --ntasks=1 --ntasks-per-node=1"));
}

// A rank that srun starts knows how many there are on its node.
TEST_F(SlurmTraining, TasksMayBeUnevenOverTheNodes) {
  for (const auto& [options, first_node] :
       {std::pair{"--ntasks-per-node=2", 2}, {"--distribution=plane=3", 3}}) {
    Command job(shell(
        std::string("srun -N2 -n4 ") + options + " " +
        test_program("launchers_rank") + " gloo"));
    EXPECT_EQ(job.wait(), 0) << job.err();
    Words lines;
    for (int rank = 0; rank < 4; ++rank) {
      const int node = rank < first_node ? 0 : 1;
      std::ostringstream line;
      line << "rank " << rank << " of 4, "
           << (node == 0 ? rank : rank - first_node) << " of "
           << (node == 0 ? first_node : 4 - first_node) << " on node " << node
           << ", gloo, sum 10";
      lines.push_back(line.str());
    }
    EXPECT_THAT(lines_of(job.out()), testing::UnorderedElementsAreArray(lines));
  }
}

TEST_F(SlurmTraining, AJobThatIsStoppedIsQueuedAgainAndGoesOn) {
  // The second start ends soon after the step that the first has saved.
  const std::string job = slurm_.submit(
      "steps=1000000\n"
      "if [ ${SLURM_RESTART_COUNT:-0} -gt 0 ]; then\n"
      "  until [ -e steps ]; do sleep 0.05; done\n"
      "  steps=$(cat steps)\n"
      "fi\n" +
          train("", "$steps"),
      {"-N2", "--ntasks-per-node=2"});
  ASSERT_TRUE(until_steps(10)) << out();
  slurm_.output_of({"scancel", "--signal=TERM", job});
  ASSERT_TRUE(Command::until([&] { return slurm_.state_of(job) != "RUNNING"; }))
      << out();
  const int saved = saved_step();
  ASSERT_GT(saved, 0) << out();
  std::ofstream(slurm_.folder() + "/part") << saved + 3;
  fs::rename(slurm_.folder() + "/part", slurm_.folder() + "/steps");
  ASSERT_TRUE(slurm_.until_state(job, "COMPLETED")) << out();
  EXPECT_THAT(
      out(), HasAll(
                 "stopped by SIGTERM",
                 "resumes from step " + std::to_string(saved) + " of " + run(),
                 "after " + std::to_string(saved + 3) + " steps"));
  EXPECT_THAT(
      slurm_.output_of({"scontrol", "show", "job", job}),
      HasSubstr("Restarts=1"));
}

// srun ends the tasks that are left when one has failed, also one whose state
// is saved already.
TEST_F(SlurmTraining, KillOnBadExitKeepsCode75) {
  std::ofstream(slurm_.folder() + "/job.toml")
      << "[model]\nname = \"mlp\"\nhidden = [32]\n[data]\nname = \"digits\"\n"
         "[layout]\ndp = 4\n[train]\nbatch = 32\nsteps = 1000000\nrun = \""
      << run() << "\"\n";
  Command job(shell(
      "srun -N2 -n4 --ntasks-per-node=2 --kill-on-bad-exit=1 " +
      program("echelon-train") + " train job.toml"));
  ASSERT_TRUE(until_steps(10)) << job.err();
  // The first rank saves, and then waits for a reader of its report. Signals
  // within two seconds of the first are the same stop, so another one comes
  // later.
  const pid_t first = first_rank(job);
  ASSERT_GT(first, 0);
  const std::string report =
      run() + "/report.html." + std::to_string(first) + ".partial";
  ASSERT_EQ(mkfifo(report.c_str(), 0600), 0);
  const std::string number = slurm_.output_of({"squeue", "-h", "-o", "%i"});
  slurm_.output_of({"scancel", "--signal=TERM", number});
  ASSERT_TRUE(Command::until([&] {
    return fs::exists(run() + "/timeline.json");
  })) << job.out()
      << job.err();
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  ASSERT_EQ(kill(first, SIGTERM), 0);
  Command reader({"cat", report});
  EXPECT_EQ(job.wait(), 75) << job.out() << job.err();
  EXPECT_GT(saved_step(), 0);
}

// The hosts share the run's folder, and no socket.
TEST_F(SlurmTraining, AJobIsAskedFromAnotherHost) {
  const std::string job = slurm_.submit(
      train("", "1000000"), {"--nodelist=n1", "--ntasks-per-node=2"});
  ASSERT_TRUE(until_steps(10)) << out();
  const auto ask = [&](const Words& words) {
    return slurm_.output_of({program("echelon"), "job", words[0], words[1]});
  };
  EXPECT_THAT(
      ask({"status", run()}), HasSubstr(run() + ": 2 ranks, dp=2, step "));
  EXPECT_THAT(ask({"stop", run()}), HasSubstr(run()));
  ASSERT_TRUE(slurm_.until_state(job, "PENDING")) << out();
  EXPECT_GT(saved_step(), 0);
  // It waits for its next start.
  Command late(slurm_.on_first({program("echelon"), "job", "stop", run()}));
  EXPECT_NE(late.wait(), 0);
  EXPECT_THAT(late.err(), HasSubstr("on node n1 of Slurm job " + job));
}

TEST_F(SlurmTraining, AJobWhoseNodeIsLostIsQueuedAgain) {
  const std::string job = slurm_.submit(
      train("--set checkpoint.every_steps=5", "1000000"),
      {"-N2", "--ntasks-per-node=2"});
  ASSERT_TRUE(until_steps(30)) << out();
  slurm_.lose_node(1);
  EXPECT_TRUE(slurm_.until_state(job, "PENDING")) << out();
}

// A job that may shrink goes on on what is left of its allocation.
TEST_F(SlurmTraining, NoKillGoesOnWithWhatIsLeft) {
  const std::string job = slurm_.submit(
      train("--nnodes 1:2 --max-restarts 3", "1000000"),
      {"-N2", "--ntasks-per-node=2", "--no-kill"});
  ASSERT_TRUE(until_steps(30)) << out();
  slurm_.lose_node(1);
  const int before = steps_done();
  EXPECT_TRUE(Command::until([&] { return steps_done() > before + 100; }))
      << out();
  EXPECT_EQ(slurm_.state_of(job), "RUNNING");
  EXPECT_EQ(slurm_.output_of({"squeue", "-h", "-j", job, "-o", "%D"}), "1");
  slurm_.output_of({"scancel", "--signal=TERM", job});
  EXPECT_TRUE(Command::until([&] { return slurm_.state_of(job) != "RUNNING"; }))
      << out();
}

/// Two nodes of two GPUs, and two projects that have two each for sure.
class SlurmQuota : public SlurmTraining {
 protected:
  SlurmQuota() : SlurmTraining({.gpus = 2, .accounting = true}) {}
  void SetUp() override {
    SlurmTraining::SetUp();
    if (IsSkipped()) return;
    for (const char* name : {"language", "vision"}) slurm_.add_project(name, 2);
  }
  /// Exit codes of the steps that the job has had, in each of its starts.
  std::string codes_of(const std::string& job) const {
    return slurm_.output_of(
        {"sacct", "--noheader", "--parsable2", "--duplicates", "--jobs=" + job,
         "--format=JobID,State,ExitCode"});
  }
};

// benchmarks/slurm_quota.py reads what is printed, and says how often.
TEST_F(SlurmQuota, AGuaranteedJobPreemptsOneThatSavesAndGoesOn) {
  const char* asked = std::getenv("ECHELON_QUOTA_TRIES");
  const int tries = asked == nullptr ? 1 : std::atoi(asked);
  const std::string borrower = slurm_.submit(
      train("", "1000000"), {"--account=language", "-N2", "--ntasks-per-node=2",
                             "--gpus-per-node=2"});
  int before = 0;
  for (int i = 1; i <= tries; ++i) {
    ASSERT_TRUE(Command::until([&] { return last_step() >= before + 10; }))
        << out();
    const std::string name = "vision" + std::to_string(i);
    const auto begin = std::chrono::steady_clock::now();
    const std::string owner = slurm_.submit(
        train("", "20", name),
        {"--account=vision", "--qos=vision-guaranteed", "-N1",
         "--ntasks-per-node=2", "--gpus-per-node=2"});
    ASSERT_TRUE(Command::until([&] { return last_step(name) > 0; }))
        << out() << slurm_.output_of({"scontrol", "show", "job", owner});
    const std::chrono::duration<double> seconds =
        std::chrono::steady_clock::now() - begin;
    EXPECT_EQ(slurm_.state_of(borrower), "PENDING");
    const int done = last_step();
    const int saved = saved_step();
    EXPECT_EQ(saved, done);
    EXPECT_GT(saved, before);
    // What the first step of each start has ended with.
    EXPECT_EQ(
        testing_support::count(codes_of(borrower), borrower + ".0|FAILED|75:0"),
        i);
    std::printf(
        "first step after %.3f s; saved step %d of %d\n", seconds.count(),
        saved, done);
    std::fflush(stdout);
    ASSERT_TRUE(slurm_.until_state(owner, "COMPLETED")) << out();
    ASSERT_TRUE(until_out(
        "resumes from step " + std::to_string(saved) + " of " + run()))
        << out();
    before = saved;
  }
}

/// Two nodes of two GPUs, which a stand-in for the driver shows as Slurm says.
class SlurmGpus : public Slurm {
 protected:
  SlurmGpus() : Slurm({.gpus = 2}) {}
};

// The launcher of a node shares all of the node's GPUs out.
TEST_F(SlurmGpus, ALauncherHasThoseOfAllTasksOfItsNode) {
  for (const char* gpus : {"--gpus-per-task=1", "--gpus-per-node=2"}) {
    const std::string job = slurm_.submit(
        kRun +
            "-- sh -c 'echo $RANK of $WORLD_SIZE on $SLURMD_NODENAME sees "
            "$CUDA_VISIBLE_DEVICES'",
        {"-N2", "--ntasks-per-node=2", gpus});
    ASSERT_TRUE(slurm_.until_state(job, "COMPLETED")) << out();
    EXPECT_THAT(
        out(), HasAll(
                   "0 of 4 on n0 sees 0,1\n", "1 of 4 on n0 sees 0,1\n",
                   "2 of 4 on n1 sees 0,1\n", "3 of 4 on n1 sees 0,1\n"));
    fs::remove(slurm_.folder() + "/out");
  }
}

// Two of one node and one of the other.
TEST_F(SlurmGpus, UnevenNumbersNeedOneOfTheUser) {
  const std::string place =
      "-- sh -c 'echo $RANK of $WORLD_SIZE on $SLURMD_NODENAME'\n";
  const std::string job =
      slurm_.submit(kRun + place + kRun + "-n 1 " + place, {"-N2", "--gpus=3"});
  ASSERT_TRUE(slurm_.until_state(job, "COMPLETED")) << out();
  EXPECT_THAT(
      out(), HasAll(
                 "has 3 GPUs on 2 nodes, ",
                 " of them here, and this command starts as many ranks on "
                 "each: give -n",
                 "0 of 2 on n0\n", "1 of 2 on n1\n"));
}

// Without launchers: what Slurm shows a task of srun, and what it takes.
TEST_F(SlurmGpus, EachTaskTakesItsOwn) {
  if (!fs::exists(program("echelon-train"))) {
    GTEST_SKIP() << "needs LibTorch: build with ECHELON_LIBTORCH";
  }
  for (const bool one : {true, false}) {
    const std::string gpus = one ? "--gpus-per-task=1" : "--gpus-per-node=2";
    const std::string first = one ? "cuda:0 of 1" : "cuda:0 of 2";
    const std::string second = one ? "cuda:0 of 1" : "cuda:1 of 2";
    Command job(
        shell(
            "srun -N2 -n4 --ntasks-per-node=2 " + gpus + " " +
            test_program("launchers_rank") + " gpus"),
        {"LD_LIBRARY_PATH=" + test_program("fake_cuda"),
         "FAKE_CUDA_MACHINE=ab"});
    EXPECT_EQ(job.wait(), 0) << job.err();
    EXPECT_THAT(
        lines_of(job.out()),
        UnorderedElementsAre(
            "local rank 0 of node 0 takes " + first + ", 6161",
            "local rank 1 of node 0 takes " + second + ", 6262",
            "local rank 0 of node 1 takes " + first + ", 6161",
            "local rank 1 of node 1 takes " + second + ", 6262"));
  }
}

}  // namespace echelon::slurm_test
