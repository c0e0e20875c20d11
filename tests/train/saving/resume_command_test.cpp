// Saving and resuming by the command line, as users and schedulers do it.
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "echelon/checkpoint/files/checked_file.h"
#include "echelon/checkpoint/files/folder.h"
#include "echelon/checkpoint/files/reader.h"
#include "echelon/checkpoint/tensors/tensor_file.h"
#include "echelon/text/text_file.h"
#include "echelon/timeline/metrics.h"
#include "tests/support/error_text.h"
#include "tests/support/process.h"
#include "tests/train/trained_command.h"

namespace echelon::resume_command_test {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing_support::Command;
using testing_support::TempFolder;

class ResumeCommand : public testing::Test {
 protected:
  std::string run() const { return folder_.path() + "/run"; }

  Words train(int64_t steps, const Words& more = {}) const {
    return train_digits(run(), steps) +
           Words{"-n", "2", "--set", "optimizer.schedule=constant"} + more;
  }
  template <typename... Said>
  void finishes(const Words& words, const Said&... said) {
    Command job(words);
    ASSERT_EQ(job.wait(), 0) << job.err();
    EXPECT_THAT(job.out(), HasAll("", said...));
  }
  void refused(const Words& words, int exit_code, const std::string& message) {
    Command job(words);
    EXPECT_EQ(job.wait(), exit_code);
    EXPECT_THAT(job.err(), HasSubstr(message));
  }
  void expect_every_step_once(size_t count) const {
    const auto all = steps();
    ASSERT_EQ(all.size(), count);
    for (size_t i = 0; i < count; ++i) {
      ASSERT_EQ(all[i].step, static_cast<int64_t>(i) + 1);
    }
  }
  static void kill_all(Command& job) {
    for (const pid_t pid : job.living()) kill(pid, SIGKILL);
    EXPECT_NE(job.wait(), 0);
    ASSERT_TRUE(Command::until([&] { return job.living().empty(); }));
  }

  std::vector<CheckpointPlace> checkpoints() const {
    return list_checkpoints(fs::path(run()) / "checkpoints");
  }
  std::vector<timeline::StepMetrics> steps() const {
    return timeline::read_metrics(fs::path(run()) / "metrics.jsonl").steps;
  }

  TempFolder folder_;
};

TEST_F(ResumeCommand, TheSameCommandResumes) {
  finishes(train(4));
  finishes(train(4), " has 4 of 4 steps");
  Command second(train(7, {"--layout", "fsdp=2"}));
  ASSERT_EQ(second.wait(), 0) << second.err();
  EXPECT_THAT(
      second.out(), HasAll(
                        "resumes from step 4 of " + run() +
                            "/checkpoints/step-00000004, "
                            "saved with dp=2 on 2 ranks",
                        "layout: was dp=2, now fsdp=2"));
  expect_every_step_once(7);
  finishes(train(2, {"--overwrite"}));
  EXPECT_EQ(steps().size(), 2u);
}

TEST_F(ResumeCommand, AFinishedRunRefusesOtherSettings) {
  finishes(train(2));
  Command other(train(2, {"--set", "optimizer.learning_rate=0.5"}));
  EXPECT_EQ(other.wait(), 2);
  EXPECT_THAT(
      other.err(),
      HasAll(
          run() + " has all its 2 steps, with other settings: [optimizer] "
                  "learning_rate = 0.5, not ",
          "(--set train.run=" + run() + "-2, "));
  // One of its own for each rate.
  for (const char* rate : {"0.5", "0.25"}) {
    finishes(train(
        2, {"--set", std::string("optimizer.learning_rate=") + rate, "--set",
            "train.run=" + run() + "-{set}"}));
  }
  std::vector<std::string> names;
  for (const auto& entry :
       fs::directory_iterator(fs::path(run()).parent_path())) {
    const std::string name = entry.path().filename().string();
    if (name.find("learning_rate=") == std::string::npos) continue;
    names.push_back(name);
    EXPECT_TRUE(fs::exists(entry.path() / "report.html"));
  }
  EXPECT_THAT(
      names,
      testing::UnorderedElementsAre(
          HasSubstr("learning_rate=0.5"), HasSubstr("learning_rate=0.25")));
}

TEST_F(ResumeCommand, TheReportSaysWhereAndHowTheRunWasMade) {
  finishes(train(2));
  const std::string page = read_text_file(run() + "/report.html");
  EXPECT_THAT(
      page,
      HasAll(
          ">Ended</dt><dd>20", ">Host</dt><dd>", ">Versions</dt><dd>Echelon ",
          ", LibTorch 2.", ">Command</dt><dd>"));
  // As the user typed it, not the command of a rank.
  EXPECT_THAT(page, HasSubstr("echelon train "));
}

TEST_F(ResumeCommand, AFinishedRunTakesSettingsThatChangeNoResult) {
  finishes(train(2));
  finishes(
      train(
          2, {"--set", "train.log_every=1", "--set", "train.timeline_steps=5",
              "--set", "checkpoint.keep=3"}),
      run() + " is finished: it has 2 of 2 steps");
}

TEST_F(ResumeCommand, ARunThatBeganFromAnotherCanBeQueuedAgain) {
  finishes(train(3));
  const std::string other = folder_.path() + "/other";
  fs::rename(run(), other);
  for (const int64_t steps : {5, 7}) {
    finishes(
        train(steps, {"--resume", other}),
        "resumes from step " + std::to_string(steps - 2) + " of " +
            (steps == 5 ? other : run()));
  }
  EXPECT_EQ(steps().front().step, 4);
  EXPECT_EQ(steps().back().step, 7);
  refused(
      train(2, {"--resume", run(), "--overwrite"}), 2,
      "overwrite would remove");
  EXPECT_EQ(steps().back().step, 7);
}

// A crash at the end of a run leaves some of them out.
TEST_F(ResumeCommand, WhatAFinishedRunLacksIsMade) {
  finishes(train(2));
  for (const char* made :
       {"report.html", "timeline.json", "checkpoints/last.safetensors"}) {
    SCOPED_TRACE(made);
    fs::remove(fs::path(run()) / made);
    finishes(train(2), std::string(" has 2 of 2 steps, but no ") + made);
    EXPECT_TRUE(fs::exists(fs::path(run()) / made));
  }
  // A page of before its end, beside the timeline of an earlier process.
  finishes({kEchelon, "report", run(), "-o", run() + "/report.html"});
  finishes(train(2), " has 2 of 2 steps, but no report.html of its end");
  finishes(train(2), " is finished: it has 2 of 2 steps");
  expect_every_step_once(2);
}

// What a scheduler does before it takes the machines away.
TEST_F(ResumeCommand, SigtermSavesAndEndsWith75) {
  Command job(train(1000000));
  ASSERT_TRUE(Command::until([&] {
    return fs::exists(run() + "/metrics.jsonl") && steps().size() > 20;
  }));
  // Slurm signals every process; the launcher passes its own on.
  for (const pid_t rank : ranks_of(job)) kill(rank, SIGTERM);
  job.signal(SIGTERM);
  for (const pid_t rank : ranks_of(job)) kill(rank, SIGTERM);
  EXPECT_EQ(job.wait(std::chrono::seconds(30)), 75) << job.err();
  ASSERT_EQ(checkpoints().size(), 1u);
  const int64_t step = checkpoints()[0].step;
  EXPECT_EQ(steps().back().step, step);
  EXPECT_TRUE(fs::exists(run() + "/report.html"));
  finishes(train(step + 2), "resumes from step " + std::to_string(step));
}

TEST_F(ResumeCommand, SigtermBeforeTheFirstStepIsNoFailure) {
  for (const int ms : {0, 20, 60, 120, 200, 300}) {
    SCOPED_TRACE(ms);
    fs::remove_all(run());
    Command job(train(1000000));
    ASSERT_TRUE(
        Command::until([&] { return fs::exists(run() + "/config.toml"); }));
    std::this_thread::sleep_for(std::chrono::milliseconds(ms));
    job.signal(SIGTERM);
    EXPECT_EQ(job.wait(std::chrono::seconds(30)), 75) << job.err();
    EXPECT_TRUE(Command::until([&] { return job.living().empty(); }));
  }
}

TEST_F(ResumeCommand, AClosedTerminalLosesNothing) {
  Command job(train(1000000));
  ASSERT_TRUE(Command::until([&] {
    return fs::exists(run() + "/metrics.jsonl") && !steps().empty();
  }));
  job.signal(SIGHUP);
  EXPECT_EQ(job.wait(std::chrono::seconds(30)), 130) << job.err();
  ASSERT_EQ(checkpoints().size(), 1u);
  EXPECT_EQ(steps().back().step, checkpoints()[0].step);
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
  kill_all(job);
  const int64_t step = checkpoints()[0].step;
  finishes(train(step + 3, every));
  expect_every_step_once(static_cast<size_t>(step + 3));
}

// The launcher does by itself what the same command would do again.
TEST_F(ResumeCommand, AKilledRankStartsAgainAndChangesNothing) {
  constexpr int64_t kSteps = 400;
  const Words settings = set({"checkpoint.every_steps=10"});
  finishes(train(kSteps, settings));
  const auto undisturbed = steps();
  const std::string hash =
      read_manifest(checkpoints()[0].path.string()).content_hash;
  for (const char* resume : {"auto", "never"}) {
    fs::remove_all(run());
    Command job(train(
        kSteps, settings + Words{"--max-restarts", "1"} +
                    set({std::string("checkpoint.resume=") + resume})));
    for (const size_t victim : {1, 0}) {
      const auto before =
          checkpoints().empty() ? 0 : checkpoints().front().step;
      ASSERT_TRUE(Command::until([&] {
        return !checkpoints().empty() && checkpoints()[0].step > before + 10 &&
               ranks_of(job).size() == 2;
      }));
      kill(ranks_of(job)[victim], SIGKILL);
      const std::string said =
          "restart " + std::to_string(2 - victim) +
          " after a kill from outside, which --max-restarts does not count, "
          "from step";
      ASSERT_TRUE(Command::until([&] {
        return job.err().find(said) != std::string::npos;
      })) << job.err();
    }
    EXPECT_EQ(job.wait(), 0) << job.err();
    expect_every_step_once(kSteps);
    const auto all = steps();
    for (size_t i = 0; i < all.size(); ++i) {
      ASSERT_EQ(all[i].loss, undisturbed[i].loss) << i;
    }
    EXPECT_EQ(read_manifest(checkpoints()[0].path.string()).content_hash, hash);
  }
}

// Without a checkpoint on disk.
TEST_F(ResumeCommand, AKilledRankGoesOnFromMemory) {
  constexpr int64_t kSteps = 200;
  finishes(train(kSteps));
  const auto undisturbed = steps();
  const std::string hash =
      read_manifest(checkpoints()[0].path.string()).content_hash;
  fs::remove_all(run());
  Command job(train(kSteps, set({"elastic.memory_steps=1"})));
  size_t done = 0;
  for (const int restart : {1, 2}) {
    ASSERT_TRUE(Command::until([&] {
      return fs::exists(run() + "/metrics.jsonl") &&
             steps().size() > done + 20 && ranks_of(job).size() == 2;
    }));
    done = steps().size();
    kill(ranks_of(job)[restart % 2], SIGKILL);
    const std::string said =
        "restart " + std::to_string(restart) +
        " after a kill from outside, which --max-restarts does not count, from "
        "step ";
    ASSERT_TRUE(Command::until([&] {
      return job.err().find(said) != std::string::npos;
    })) << job.err();
    const size_t at = job.err().find(said) + said.size();
    EXPECT_GE(std::stoull(job.err().substr(at)), done - 1);
  }
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(job.out(), HasSubstr("in memory, saved with dp=2 on 2 ranks"));
  expect_every_step_once(kSteps);
  const auto all = steps();
  for (size_t i = 0; i < all.size(); ++i) {
    ASSERT_EQ(all[i].loss, undisturbed[i].loss) << i;
  }
  EXPECT_EQ(read_manifest(checkpoints()[0].path.string()).content_hash, hash);
}

// In the ranks that go on, and again in those of the next start.
TEST_F(ResumeCommand, TrainingGoesBackAndLeavesOutBadSamples) {
  constexpr int64_t kBatch = 16;
  torch::manual_seed(1);
  auto inputs = torch::rand({40 * kBatch, 1, 8, 8});
  for (const int64_t step : {6, 7, 8, 9}) {
    inputs[step * kBatch - 1].fill_(std::numeric_limits<float>::quiet_NaN());
  }
  const std::string path = folder_.path() + "/data.safetensors";
  save_tensors(
      path, {{"inputs", inputs}, {"targets", torch::arange(40 * kBatch) % 10}});
  const Words words =
      train(20, {"--set", "data.name=tensors", "--set", "data.path=" + path}) +
      set(
          {"data.shuffle=false", "data.holdout=0", "train.batch=16",
           "train.on_non_finite=rollback", "elastic.memory_steps=1"});
  finishes(
      words,
      "training goes back to step 5 in memory, and leaves out samples 80 to "
      "143 of epoch 0");
  expect_every_step_once(20);
  const auto losses = steps();
  for (const auto& step : losses) EXPECT_TRUE(std::isfinite(step.loss));
  Command explained({kEchelon, "explain", run()});
  EXPECT_EQ(explained.wait(), 0) << explained.err();
  EXPECT_THAT(
      explained.out() + explained.err(),
      HasSubstr("training went back from step 9 to step 5, without samples "));
  fs::remove_all(fs::path(run()) / "checkpoints");
  finishes(words);
  const auto again = steps();
  ASSERT_EQ(again.size(), losses.size());
  for (size_t i = 0; i < again.size(); ++i) {
    EXPECT_EQ(again[i].loss, losses[i].loss) << i;
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
  kill_all(job);
  ASSERT_TRUE(checkpoints().empty());
  finishes(train(kSteps), "it starts over");
  const auto all = steps();
  ASSERT_EQ(all.size(), kSteps);
  EXPECT_EQ(all.front().step, 1);
  EXPECT_EQ(all.back().step, kSteps);
}

// Kills one rank or both while files are written all the time: the checkpoints
// that are left are complete, and training resumes from them.
TEST_F(ResumeCommand, RanksThatDieLeaveCompleteCheckpoints) {
  const Words always = set({"checkpoint.every_steps=1", "checkpoint.keep=3"}) +
                       Words{"--max-restarts", "0"};
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
  finishes(train(last + 2, always));
  expect_every_step_once(static_cast<size_t>(last + 2));
  for (const auto& entry :
       fs::directory_iterator(fs::path(run()) / "checkpoints")) {
    EXPECT_THAT(
        entry.path().filename().string(), testing::Not(HasSubstr("partial")));
  }
}

// A limit on file sizes takes the place of a full disk.
TEST_F(ResumeCommand, AFullDiskIsAWarningThenAnError) {
  const Words limited = {
      "bash", "-c", "trap '' XFSZ; ulimit -f 1500; exec \"$@\"", "bash"};
  Command job(
      limited +
      train(
          40, set(
                  {"checkpoint.every_steps=10", "checkpoint.attempts=3",
                   "train.timeline_steps=0", "model.name=mlp",
                   "comm.backend=gloo", "model.hidden=[1024,1024]"})));
  EXPECT_EQ(job.wait(), 3) << job.err();
  EXPECT_THAT(
      job.err(), HasAll(
                     "the checkpoint of step 10 failed: ", "(1 of 3)",
                     "(2 of 3)", "; the 3. that failed in a row"));
  // A failure next to training is known when a later step ends.
  EXPECT_GE(steps().size(), 30u);
  EXPECT_TRUE(checkpoints().empty());
  for (const auto& entry : fs::directory_iterator(run() + "/checkpoints")) {
    EXPECT_EQ(entry.path().filename(), "LOCK");
  }
}

// A disk that is full for a moment: metrics.jsonl may not grow.
TEST_F(ResumeCommand, MetricsThatCannotBeWrittenAreWrittenLater) {
  Command job(
      Words{"bash", "-c", "trap '' XFSZ; exec \"$@\"", "bash"} +
      train(1000000, set({"comm.backend=gloo"})));
  const auto size = [&] {
    std::error_code error;
    const auto bytes = fs::file_size(run() + "/metrics.jsonl", error);
    return error ? 0 : static_cast<int64_t>(bytes);
  };
  ASSERT_TRUE(Command::until([&] { return size() > 2000; }));
  const auto ranks = ranks_of(job);
  rlimit before{};
  ASSERT_EQ(prlimit(ranks[0], RLIMIT_FSIZE, nullptr, &before), 0);
  const rlimit full = {static_cast<rlim_t>(size() + 500), before.rlim_max};
  for (const pid_t rank : ranks) prlimit(rank, RLIMIT_FSIZE, &full, nullptr);
  ASSERT_TRUE(Command::until([&] {
    return job.out().find("cannot write") != std::string::npos;
  })) << job.out();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_LE(size(), static_cast<int64_t>(full.rlim_cur));
  for (const pid_t rank : ranks) prlimit(rank, RLIMIT_FSIZE, &before, nullptr);
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(std::chrono::seconds(30)), 75) << job.err();
  ASSERT_EQ(checkpoints().size(), 1u);
  expect_every_step_once(static_cast<size_t>(checkpoints()[0].step));
  EXPECT_EQ(testing_support::count(job.out(), "cannot write"), 1);
}

TEST_F(ResumeCommand, ARunningJobsFolderIsNotTouched) {
  Command job(train(1000000, {"--set", "checkpoint.every_steps=5"}));
  ASSERT_TRUE(Command::until([&] { return !checkpoints().empty(); }));
  for (const Words& more : {Words{}, Words{"--overwrite"}}) {
    refused(train(3, more), 3, "process ");
  }
  const auto before = steps().size();
  EXPECT_TRUE(Command::until([&] { return steps().size() > before; }));
  job.signal(SIGINT);
  EXPECT_EQ(job.wait(std::chrono::seconds(30)), 130);
}

TEST_F(ResumeCommand, NeitherIsThatOfARunWithoutCheckpoints) {
  const Words none = {"--set", "checkpoint.at_end=false"};
  Command job(train(1000000, none));
  const auto has_steps = [&] {
    return fs::exists(run() + "/metrics.jsonl") && !steps().empty();
  };
  ASSERT_TRUE(Command::until(has_steps));
  refused(train(3, none + Words{"--overwrite"}), 3, "writes here");
  EXPECT_TRUE(has_steps());
  job.signal(SIGINT);
  EXPECT_EQ(job.wait(std::chrono::seconds(30)), 130);
}

TEST_F(ResumeCommand, RefusesWhatIsNoCheckpoint) {
  refused(train(3, {"--resume", folder_.path() + "/nothing"}), 3, "/nothing");
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
      foreign.err(), HasAll(
                         "torch.distributed.checkpoint (DCP)", "dcp_to_torch",
                         "[model] weights"));
  EXPECT_FALSE(fs::exists(run()));
}

TEST_F(ResumeCommand, VerifyProvesACheckpoint) {
  const Words words = {kEchelon, "verify", kDigits,  "--resume", "--layout",
                       "dp=2",   "--then", "fsdp=4", "--steps",  "2"};
  Command verify(words);
  EXPECT_EQ(verify.wait(), 0) << verify.err();
  EXPECT_THAT(
      verify.out(),
      HasAll("random state is that of 2 ranks, here are 4", "equal: "));
  Command json(words + Words{"--json"});
  EXPECT_EQ(json.wait(), 0) << json.err();
  const auto answer = nlohmann::json::parse(json.out());
  EXPECT_EQ(answer.at("passed"), true);
  EXPECT_THAT(
      answer.at("loaded").at(0).get<std::string>(), HasSubstr("here are 4"));
  refused({kEchelon, "verify", kDigits, "--resume"}, 2, "give both");
}

// The run that both begin with has saved between their looks.
TEST_F(ResumeCommand, RanksThatFindDifferentCheckpointsSaySo) {
  finishes(train(4, {"--set", "checkpoint.every_steps=2"}));
  const int port = testing_support::free_port();
  const auto rank = [&](int number) {
    const std::string name = folder_.path() + "/" + std::to_string(number);
    std::string text = testing_support::read_file(run() + "/config.toml");
    const auto put = [&](const std::string& key, const std::string& value) {
      const size_t at = text.find("\n" + key + " = ") + 1;
      text.replace(at, text.find('\n', at) - at, key + " = \"" + value + "\"");
    };
    put("run", folder_.path() + "/next");
    put("resume", checkpoints().at(static_cast<size_t>(number)).path.string());
    std::ofstream(name) << text;
    return std::make_unique<Command>(
        Words{program("echelon-train"), "train", name},
        Words{
            "RANK=" + std::to_string(number),
            "LOCAL_RANK=" + std::to_string(number), "WORLD_SIZE=2",
            "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1",
            "MASTER_PORT=" + std::to_string(port)});
  };
  const auto first = rank(0), second = rank(1);
  for (Command* one : {first.get(), second.get()}) {
    EXPECT_NE(one->wait(), 0);
    EXPECT_THAT(
        one->err(),
        HasAll("resume = ", "ranks have found different checkpoints"));
  }
}

}  // namespace echelon::resume_command_test
