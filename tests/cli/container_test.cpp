// echelon as process 1, as in a container: a process namespace of its own. The
// kernel gives process 1 the orphans of all others, and takes a signal to it
// from the host alone, where it has a handler.
#include <gmock/gmock.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/support/places.h"
#include "tests/support/process.h"

namespace echelon::container_test {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::IsEmpty;
using testing_support::Command;
using testing_support::TempFolder;
using Words = std::vector<std::string>;

class ProcessOne : public testing::Test {
 protected:
  void SetUp() override {
    Command trial(in_container({"true"}));
    if (trial.wait() != 0) {
      GTEST_SKIP() << "this system allows no process namespaces: "
                   << trial.err();
    }
  }
  static Words in_container(const Words& words) {
    Words all = {"unshare", "--pid", "--fork", "--mount-proc"};
    all.insert(all.end(), words.begin(), words.end());
    return all;
  }
  static Words run(const std::string& script) {
    return in_container(
        {program("echelon"), "run", "--no-prefix", "-n", "2", "--max-restarts",
         "0", "--", "sh", "-c", script});
  }
  /// The namespace's process 1, by its number outside.
  static pid_t first_of(const Command& container) {
    const std::string pid = std::to_string(container.pid());
    std::ifstream children("/proc/" + pid + "/task/" + pid + "/children");
    pid_t first = -1;
    children >> first;
    return first;
  }
};

// The inner shell ends at once, so that its child is an orphan, and a zombie
// until somebody takes it.
TEST_F(ProcessOne, TakesOrphansAndEndsThem) {
  Command job(
      run("grep -q echelon /proc/1/cmdline || exit 9\n"
          "orphan=$(true >/dev/null & echo $!)\n"
          "while [ -e /proc/$orphan ]; do sleep 0.02; done\n"
          "echo taken\n"
          "setsid sleep 1000 >/dev/null 2>&1 &\n"));
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(testing_support::count(job.out(), "taken\n"), 2) << job.err();
  EXPECT_THAT(job.living(), IsEmpty());
}

TEST_F(ProcessOne, ForwardsSigterm) {
  Command job(
      run("trap 'echo saved; exit 75' TERM\n"
          "echo ready\n"
          "while :; do sleep 0.02; done\n"));
  ASSERT_TRUE(job.until_output("ready\n", 2)) << job.err();
  ASSERT_EQ(kill(first_of(job), SIGTERM), 0);
  EXPECT_EQ(job.wait(), 75) << job.err();
  EXPECT_EQ(testing_support::count(job.out(), "saved\n"), 2) << job.err();
}

TEST_F(ProcessOne, SavesATrainingJob) {
  if (!fs::exists(program("echelon-train"))) {
    GTEST_SKIP() << "needs LibTorch: build with ECHELON_LIBTORCH";
  }
  const TempFolder folder;
  const std::string run = folder.path() + "/run";
  Command job(in_container(
      {program("echelon"), "train", source_path("examples/configs/digits.toml"),
       "-n", "2", "--set", "train.run=" + run, "--set", "train.epochs=0",
       "--set", "train.steps=1000000", "--set", "optimizer.warmup_steps=0"}));
  const std::string metrics = run + "/metrics.jsonl";
  ASSERT_TRUE(Command::until([&] {
    return testing_support::count(
               testing_support::read_file(metrics), "\"step\"") >= 3;
  })) << job.err();
  ASSERT_EQ(kill(first_of(job), SIGTERM), 0);
  EXPECT_EQ(job.wait(), 75) << job.err();
  EXPECT_THAT(job.out() + job.err(), HasSubstr("stopped by SIGTERM"));
  EXPECT_TRUE(fs::exists(run + "/checkpoints/LATEST")) << job.out();
}

}  // namespace echelon::container_test
