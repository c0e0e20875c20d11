// Saving and resuming by the command line, as users and schedulers do it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "echelon/checkpoint/files/folder.h"
#include "echelon/checkpoint/files/reader.h"
#include "echelon/timeline/metrics.h"
#include "tests/support/places.h"
#include "tests/support/process.h"

namespace echelon {
namespace resume_command_test {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing_support::Command;
using testing_support::TempFolder;
using Words = std::vector<std::string>;

const std::string kEchelon = program("echelon");
const std::string kDigits = source_path("examples/configs/digits.toml");

class ResumeCommand : public testing::Test {
 protected:
  std::string run() const { return folder_.path() + "/run"; }

  Words train(int64_t steps, const Words& more = {}) const {
    Words words = {
        kEchelon,
        "train",
        kDigits,
        "-n",
        "2",
        "--set",
        "train.run=" + run(),
        "--set",
        "train.epochs=0",
        "--set",
        "train.steps=" + std::to_string(steps),
        "--set",
        "optimizer.warmup_steps=0",
        "--set",
        "optimizer.schedule=constant"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  std::vector<CheckpointPlace> checkpoints() const {
    return list_checkpoints(fs::path(run()) / "checkpoints");
  }
  std::vector<StepMetrics> steps() const {
    return read_metrics(fs::path(run()) / "metrics.jsonl").steps;
  }

  TempFolder folder_;
};

TEST_F(ResumeCommand, TheSameCommandResumes) {
  Command first(train(4));
  ASSERT_EQ(first.wait(), 0) << first.err();
  Command done(train(4));
  EXPECT_EQ(done.wait(), 0) << done.err();
  EXPECT_THAT(done.out(), HasSubstr(" has 4 of 4 steps"));
  Command second(train(7, {"--layout", "fsdp=2"}));
  ASSERT_EQ(second.wait(), 0) << second.err();
  EXPECT_THAT(
      second.out(), AllOf(
                        HasSubstr(
                            "resumes from step 4 of " + run() +
                            "/checkpoints/step-00000004, "
                            "saved with dp=2 on 2 ranks"),
                        HasSubstr("layout: fsdp=2, then dp=2")));
  const auto all = steps();
  ASSERT_EQ(all.size(), 7u);
  for (int64_t i = 0; i < 7; ++i) {
    EXPECT_EQ(all[static_cast<size_t>(i)].step, i + 1);
  }
  Command anew(train(2, {"--overwrite"}));
  ASSERT_EQ(anew.wait(), 0) << anew.err();
  EXPECT_EQ(steps().size(), 2u);
}

TEST_F(ResumeCommand, ARunThatBeganFromAnotherCanBeQueuedAgain) {
  Command first(train(3));
  ASSERT_EQ(first.wait(), 0) << first.err();
  const std::string other = folder_.path() + "/other";
  fs::rename(run(), other);
  for (const int64_t steps : {5, 7}) {
    Command again(train(steps, {"--resume", other}));
    ASSERT_EQ(again.wait(), 0) << again.err();
    EXPECT_THAT(
        again.out(), HasSubstr(
                         "resumes from step " + std::to_string(steps - 2) +
                         " of " + (steps == 5 ? other : run())));
  }
  EXPECT_EQ(steps().front().step, 4);
  EXPECT_EQ(steps().back().step, 7);
  Command anew(train(2, {"--resume", run(), "--overwrite"}));
  EXPECT_EQ(anew.wait(), 2);
  EXPECT_THAT(anew.err(), HasSubstr("overwrite would remove"));
  EXPECT_EQ(steps().back().step, 7);
}

// What a scheduler does before it takes the machines away.
TEST_F(ResumeCommand, SigtermSavesAndEndsWith75) {
  Command job(train(1000000));
  ASSERT_TRUE(Command::until([&] {
    return fs::exists(run() + "/metrics.jsonl") && steps().size() > 20;
  }));
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(std::chrono::seconds(30)), 75) << job.err();
  ASSERT_EQ(checkpoints().size(), 1u);
  const int64_t step = checkpoints()[0].step;
  EXPECT_EQ(steps().back().step, step);
  EXPECT_TRUE(fs::exists(run() + "/report.html"));
  Command again(train(step + 2));
  ASSERT_EQ(again.wait(), 0) << again.err();
  EXPECT_THAT(
      again.out(), HasSubstr("resumes from step " + std::to_string(step)));
}

TEST_F(ResumeCommand, Sigusr1SavesAndTrainingContinues) {
  Command job(train(1000000));
  ASSERT_TRUE(Command::until([&] {
    return fs::exists(run() + "/metrics.jsonl") && !steps().empty();
  }));
  for (size_t count = 1; count <= 2; ++count) {
    job.signal(SIGUSR1);
    ASSERT_TRUE(Command::until([&] { return checkpoints().size() == count; }))
        << job.err();
  }
  const auto before = steps().size();
  EXPECT_TRUE(Command::until([&] { return steps().size() > before; }));
  job.signal(SIGINT);
  EXPECT_EQ(job.wait(std::chrono::seconds(30)), 130);
}

TEST_F(ResumeCommand, AKilledRunResumesFromItsLastCheckpoint) {
  const Words every = {"--set", "checkpoint.every_steps=5"};
  Command job(train(1000000, every));
  ASSERT_TRUE(Command::until([&] { return !checkpoints().empty(); }));
  for (const pid_t pid : job.living()) kill(pid, SIGKILL);
  EXPECT_NE(job.wait(), 0);
  ASSERT_TRUE(Command::until([&] { return job.living().empty(); }));
  const int64_t step = checkpoints()[0].step;
  Command again(train(step + 3, every));
  ASSERT_EQ(again.wait(), 0) << again.err();
  EXPECT_EQ(steps().back().step, step + 3);
  const auto all = steps();
  for (size_t i = 0; i < all.size(); ++i) {
    ASSERT_EQ(all[i].step, static_cast<int64_t>(i) + 1);
  }
}

TEST_F(ResumeCommand, ARunKilledBeforeItsFirstCheckpointStartsOver) {
  constexpr int64_t kSteps = 1500;
  Command job(train(kSteps));
  const auto begun = [&] {
    return fs::exists(fs::path(run()) / "metrics.jsonl") && steps().size() >= 2;
  };
  ASSERT_TRUE(Command::until(begun));
  for (const pid_t pid : job.living()) kill(pid, SIGSTOP);
  Command other(train(kSteps));
  EXPECT_EQ(other.wait(), 3) << "somebody is at work";
  for (const pid_t pid : job.living()) kill(pid, SIGKILL);
  EXPECT_NE(job.wait(), 0);
  ASSERT_TRUE(Command::until([&] { return job.living().empty(); }));
  ASSERT_TRUE(checkpoints().empty());
  Command again(train(kSteps));
  ASSERT_EQ(again.wait(), 0) << again.err();
  EXPECT_THAT(again.out(), HasSubstr("it starts over"));
  const auto all = steps();
  ASSERT_EQ(all.size(), kSteps);
  EXPECT_EQ(all.front().step, 1);
  EXPECT_EQ(all.back().step, kSteps);
}

// Processes of the job that train.
std::vector<pid_t> ranks_of(const Command& job) {
  std::vector<pid_t> ranks;
  for (const pid_t pid : job.living()) {
    const std::string command =
        testing_support::read_file("/proc/" + std::to_string(pid) + "/cmdline");
    if (command.rfind(program("echelon-train"), 0) == 0) {
      ranks.push_back(pid);
    }
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

// Kills one rank or both while files are written all the time: the checkpoints
// that are left are complete, and training resumes from them.
TEST_F(ResumeCommand, RanksThatDieLeaveCompleteCheckpoints) {
  const Words always = {
      "--set", "checkpoint.every_steps=1", "--set", "checkpoint.keep=3"};
  int64_t last = 0;
  for (size_t round = 0; round < 6; ++round) {
    SCOPED_TRACE(round);
    Command job(train(1000000, always));
    ASSERT_TRUE(Command::until([&] {
      return !checkpoints().empty() &&
             checkpoints()[0].step > last + 2 + static_cast<int64_t>(round);
    })) << job.err();
    const auto ranks = ranks_of(job);
    ASSERT_EQ(ranks.size(), 2u);
    for (size_t rank = 0; rank < 2; ++rank) {
      if (round % 3 == 2 || rank == round % 3) kill(ranks[rank], SIGKILL);
    }
    EXPECT_NE(job.wait(), 0);
    ASSERT_TRUE(Command::until([&] { return job.living().empty(); }));
    ASSERT_FALSE(checkpoints().empty());
    for (const auto& place : checkpoints()) {
      for (const auto& damage : verify_checkpoint(place.path.string())) {
        ADD_FAILURE() << damage.what;
      }
    }
    EXPECT_GT(checkpoints()[0].step, last);
    last = checkpoints()[0].step;
    const auto latest = latest_checkpoint(fs::path(run()) / "checkpoints");
    ASSERT_TRUE(latest);
    EXPECT_GE(latest->step, last - 1);
  }
  Command end(train(last + 2, always));
  ASSERT_EQ(end.wait(), 0) << end.err();
  const auto all = steps();
  ASSERT_EQ(all.size(), static_cast<size_t>(last + 2));
  for (size_t i = 0; i < all.size(); ++i) {
    ASSERT_EQ(all[i].step, static_cast<int64_t>(i) + 1);
  }
  for (const auto& entry :
       fs::directory_iterator(fs::path(run()) / "checkpoints")) {
    EXPECT_THAT(
        entry.path().filename().string(), testing::Not(HasSubstr("partial")));
  }
}

// A limit on file sizes takes the place of a full disk.
TEST_F(ResumeCommand, AFullDiskIsAWarningThenAnError) {
  Words words = train(
      40,
      {"--set", "checkpoint.every_steps=10", "--set", "checkpoint.attempts=3",
       "--set", "train.timeline_steps=0", "--set", "model.name=mlp", "--set",
       "comm.backend=gloo", "--set", "model.hidden=[1024,1024]"});
  Words limited = {
      "bash", "-c", "trap '' XFSZ; ulimit -f 1500; exec \"$@\"", "bash"};
  limited.insert(limited.end(), words.begin(), words.end());
  Command job(limited);
  EXPECT_EQ(job.wait(), 3) << job.err();
  EXPECT_THAT(
      job.err(), AllOf(
                     HasSubstr("the checkpoint of step 10 failed: "),
                     HasSubstr("(1 of 3)"), HasSubstr("(2 of 3)"),
                     HasSubstr("; the 3. that failed in a row")));
  // A failure next to training is known when a later step ends.
  EXPECT_GE(steps().size(), 30u);
  EXPECT_TRUE(checkpoints().empty());
  for (const auto& entry : fs::directory_iterator(run() + "/checkpoints")) {
    EXPECT_EQ(entry.path().filename(), "LOCK");
  }
}

TEST_F(ResumeCommand, ARunningJobsFolderIsNotTouched) {
  Command job(train(1000000, {"--set", "checkpoint.every_steps=5"}));
  ASSERT_TRUE(Command::until([&] { return !checkpoints().empty(); }));
  for (const Words& more : {Words{}, Words{"--overwrite"}}) {
    Command other(train(3, more));
    EXPECT_EQ(other.wait(), 3);
    EXPECT_THAT(other.err(), HasSubstr("process "));
  }
  const auto before = steps().size();
  EXPECT_TRUE(Command::until([&] { return steps().size() > before; }));
  job.signal(SIGINT);
  EXPECT_EQ(job.wait(std::chrono::seconds(30)), 130);
}

TEST_F(ResumeCommand, RefusesWhatIsNoCheckpoint) {
  Command none(train(3, {"--resume", folder_.path() + "/nothing"}));
  EXPECT_EQ(none.wait(), 3);
  EXPECT_THAT(none.err(), HasSubstr("/nothing"));
  EXPECT_FALSE(fs::exists(run()));
  fs::create_directories(folder_.path() + "/empty");
  Command empty(train(3, {"--resume", folder_.path() + "/empty"}));
  EXPECT_EQ(empty.wait(), 3);
  EXPECT_FALSE(fs::exists(run()));
  // Another program's is said to be that, with the way to turn it into ours.
  std::ofstream(folder_.path() + "/empty/.metadata") << "";
  Command foreign(train(3, {"--resume", folder_.path() + "/empty"}));
  EXPECT_EQ(foreign.wait(), 3);
  EXPECT_THAT(
      foreign.err(),
      AllOf(
          HasSubstr("torch.distributed.checkpoint (DCP)"),
          HasSubstr("dcp_to_torch"), HasSubstr("[model] weights")));
  EXPECT_FALSE(fs::exists(run()));
}

TEST_F(ResumeCommand, VerifyProvesACheckpoint) {
  Command verify(
      {kEchelon, "verify", kDigits, "--resume", "--layout", "dp=2", "--then",
       "fsdp=4", "--steps", "2"});
  EXPECT_EQ(verify.wait(), 0) << verify.err();
  EXPECT_THAT(
      verify.out(),
      AllOf(
          HasSubstr("random state is that of 2 ranks, here are 4"),
          HasSubstr("equal: ")));
  Command json(
      {kEchelon, "verify", kDigits, "--resume", "--layout", "dp=2", "--then",
       "fsdp=4", "--steps", "2", "--json"});
  EXPECT_EQ(json.wait(), 0) << json.err();
  const auto answer = nlohmann::json::parse(json.out());
  EXPECT_EQ(answer.at("passed"), true);
  EXPECT_THAT(
      answer.at("loaded").at(0).get<std::string>(), HasSubstr("here are 4"));
  Command half({kEchelon, "verify", kDigits, "--resume"});
  EXPECT_EQ(half.wait(), 2);
  EXPECT_THAT(half.err(), HasSubstr("give both"));
}

}  // namespace resume_command_test
}  // namespace echelon
