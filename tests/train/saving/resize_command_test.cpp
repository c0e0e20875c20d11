// `echelon job`: a job that trains is asked, saved, stopped and resized.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "echelon/checkpoint/files/folder.h"
#include "echelon/timeline/metrics.h"
#include "tests/support/error_text.h"
#include "tests/support/process.h"
#include "tests/support/test_hosts.h"
#include "tests/train/trained_command.h"

namespace echelon::resize_command_test {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing_support::Command;
using testing_support::count;
using testing_support::read_file;
using testing_support::TempFolder;

class ResizeCommand : public testing::Test {
 protected:
  std::string run(const char* name = "run") const {
    return folder_.path() + "/" + name;
  }
  static Words
  train(const std::string& run, int64_t steps, const Words& more = {}) {
    return train_digits(run, steps) +
           set(
               {"train.batch=24", "model.name=mlp", "model.dtype=float64",
                "checkpoint.every_steps=0", "checkpoint.at_end=false",
                "train.eval_every=1000000"}) +
           more;
  }
  static std::vector<timeline::StepMetrics> steps(const std::string& run) {
    const auto path = fs::path(run) / "metrics.jsonl";
    if (!fs::exists(path)) return {};
    return timeline::read_metrics(path).steps;
  }
  bool until_step(size_t count) const {
    return Command::until([&] { return steps(run()).size() >= count; });
  }
  Words job(const std::string& request, const Words& more = {}) const {
    return Words{kEchelon, "job", request, run()} + more;
  }
  std::string answer(const Words& words) const {
    Command asked(words);
    EXPECT_EQ(asked.wait(), 0) << asked.err();
    return asked.out();
  }
  void refused(const Words& words, const std::string& rule) const {
    Command asked(words);
    EXPECT_EQ(asked.wait(), 2);
    EXPECT_THAT(asked.err(), HasSubstr(rule));
  }

  TempFolder folder_;
};

std::vector<int> numbers_behind(const std::string& text, const char* words) {
  std::vector<int> numbers;
  const std::string mark = words;
  for (size_t at = 0; (at = text.find(mark, at)) != std::string::npos;) {
    at += mark.size();
    numbers.push_back(std::atoi(text.c_str() + at));
  }
  return numbers;
}

// In memory, and on disk.
class Resized : public ResizeCommand,
                public testing::WithParamInterface<bool> {};

TEST_P(Resized, AJobComputesWhatOneDeviceComputes) {
  constexpr int64_t kSteps = 300;
  Words more = {"-n", "4", "--layout", "fsdp=4"};
  if (GetParam()) {
    more = more + set({"elastic.memory=off", "checkpoint.at_end=true"});
  }
  Command resized(train(run(), kSteps, more));
  std::string before = "4";
  for (const std::string ranks : {"2", "4", "3"}) {
    ASSERT_TRUE(until_step(steps(run()).size() + 2)) << resized.err();
    EXPECT_EQ(
        answer(job("resize", {ranks})).substr(run().size()),
        ": from " + before + " to " + ranks + " ranks, fsdp=" + ranks + "\n");
    ASSERT_TRUE(Command::until([&] {
      return answer(job("status")).find(": " + ranks + " ranks, fsdp=") !=
             std::string::npos;
    })) << resized.err();
    before = ranks;
  }
  ASSERT_EQ(resized.wait(), 0) << resized.err();
  // No step is done twice.
  EXPECT_EQ(
      numbers_behind(resized.err(), ", from step "),
      numbers_behind(resized.out(), "stopped by SIGTERM after "));
  EXPECT_EQ(numbers_behind(resized.err(), ", from step ").size(), 3u);

  // Only a run with checkpoints is known to be finished.
  if (GetParam()) {
    EXPECT_THAT(
        answer(train(run(), kSteps, more)), HasSubstr("is finished: it has "));
  }

  Command one(train(run("one"), kSteps));
  ASSERT_EQ(one.wait(), 0) << one.err();
  const auto got = steps(run()), wanted = steps(run("one"));
  ASSERT_EQ(got.size(), static_cast<size_t>(kSteps));
  ASSERT_EQ(wanted.size(), got.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].step, static_cast<int64_t>(i) + 1);
    ASSERT_NEAR(got[i].loss / wanted[i].loss, 1, 1e-9) << got[i].step;
  }
}

INSTANTIATE_TEST_SUITE_P(, Resized, testing::Bool(), [](const auto& info) {
  return info.param ? "OnDisk" : "InMemory";
});

class HostsThatComeAndGo : public Resized {};
INSTANTIATE_TEST_SUITE_P(
    , HostsThatComeAndGo, testing::Bool(), [](const auto& info) {
      return info.param ? "GoOnFromDisk" : "GoOnFromMemory";
    });

// A host is lost, comes back, and another one leaves. The first host is lost,
// too.
TEST_P(HostsThatComeAndGo, ComputeWhatOneDeviceComputes) {
  const testing_support::TestHosts hosts(3);
  if (!hosts.reason().empty()) GTEST_SKIP() << hosts.reason();
  constexpr int64_t kSteps = 1000000;  // until it is stopped
  const Words saves =
      GetParam() ? set({"checkpoint.every_steps=10", "elastic.memory=off"})
                 : Words{"--tls"} + set({"elastic.memory_steps=2"});
  const auto start = [&](int host) {
    return std::make_unique<Command>(hosts.on(
        host,
        train(
            run(), kSteps,
            {"-n", "1", "--layout", "fsdp=3", "--nnodes", "1:3", "--node-rank",
             std::to_string(host), "--master-addr", hosts.address(0)}) +
            saves + set({"comm.backend=gloo"})));
  };
  std::vector<std::unique_ptr<Command>> jobs;
  for (int host = 0; host < 3; ++host) jobs.push_back(start(host));
  const auto all_err = [&] {
    std::string text;
    for (const auto& job : jobs) text += job->err() + "--\n";
    return text;
  };
  const auto until_steps_in = [&](const std::string& layout) {
    ASSERT_TRUE(Command::until([&] {
      return read_file(run() + "/config.toml").find("\nfsdp = " + layout) !=
             std::string::npos;
    })) << all_err();
    ASSERT_TRUE(until_step(steps(run()).size() + 15)) << all_err();
  };
  ASSERT_TRUE(until_step(15)) << all_err();
  jobs[1]->signal(SIGKILL);
  until_steps_in("2");
  jobs[1] = start(1);
  until_steps_in("3");
  jobs[0]->signal(SIGKILL);
  until_steps_in("2");
  jobs[0] = start(0);
  until_steps_in("3");
  Command drained(hosts.on(1, job("drain")));
  EXPECT_EQ(drained.wait(), 0) << drained.err();
  EXPECT_EQ(jobs[1]->wait(), 75) << all_err();
  until_steps_in("2");
  Command stop(hosts.on(2, job("stop")));
  EXPECT_EQ(stop.wait(), 0) << stop.err();
  EXPECT_EQ(jobs[0]->wait(), 75) << all_err();
  EXPECT_EQ(jobs[2]->wait(), 75) << all_err();

  std::string resumed;
  for (const auto& job : jobs) resumed += job->out();
  EXPECT_EQ(
      count(resumed, "resumes from step ") -
          count(resumed, " in memory, saved"),
      GetParam() ? count(resumed, "resumes from step ") : 0)
      << resumed;

  const auto got = steps(run());
  Command one(train(run("one"), kSteps));
  const std::string last = "\"step\":" + std::to_string(got.back().step) + ",";
  ASSERT_TRUE(Command::until([&] {
    return count(read_file(run("one") + "/metrics.jsonl"), last) > 0;
  })) << one.err();
  one.signal(SIGTERM);
  EXPECT_EQ(one.wait(), 75) << one.err();
  const auto wanted = steps(run("one"));
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].step, static_cast<int64_t>(i) + 1);
    ASSERT_NEAR(got[i].loss / wanted[i].loss, 1, 1e-9) << got[i].step;
  }
}

// TCP repeats what is lost, and no host is taken for lost. Each step waits for
// packets several times.
TEST_F(ResizeCommand, AHostBehindABadNetworkIsKept) {
  testing_support::TestHosts hosts(2);
  if (!hosts.reason().empty()) GTEST_SKIP() << hosts.reason();
  const std::string reason = hosts.worsen(1, /*delay_ms=*/10, /*loss=*/0.04);
  if (!reason.empty()) GTEST_SKIP() << reason;
  constexpr int64_t kSteps = 10;
  const Words small = set({"model.hidden=[24]"});
  const auto start = [&](int host) {
    return std::make_unique<Command>(hosts.on(
        host,
        train(
            run(), kSteps,
            {"-n", "1", "--layout", "dp=2", "--nnodes", "1:2", "--node-rank",
             std::to_string(host), "--master-addr", hosts.address(0)}) +
            set({"elastic.memory_steps=4", "comm.backend=gloo"}) + small));
  };
  const auto first = start(0);
  const auto second = start(1);
  EXPECT_EQ(first->wait(), 0) << first->err();
  EXPECT_EQ(second->wait(), 0) << second->err();
  EXPECT_EQ(first->err() + second->err(), "");
  Command one(train(run("one"), kSteps, small));
  ASSERT_EQ(one.wait(), 0) << one.err();
  const auto got = steps(run()), wanted = steps(run("one"));
  ASSERT_EQ(got.size(), static_cast<size_t>(kSteps));
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i].loss / wanted[i].loss, 1, 1e-9) << got[i].step;
  }
}

TEST_F(ResizeCommand, RefusesWhatDoesNotFitAndGoesOn) {
  refused(job("status"), run() + ": there is no such folder");
  Command trained(train(run(), 1000000, {"-n", "2"}));
  ASSERT_TRUE(until_step(2)) << trained.err();
  refused(job("resize", {"5"}), "no layout of 5 ranks fits; dp=5: ");
  refused(job("resize", {"5"}), "\n4 and 6 fit");
  refused(job("resize", {"2"}), "it has 2 ranks");
  refused(job("resize", {"0"}), "N 0: must be a whole number from 1 to");
  const size_t before = steps(run()).size();
  ASSERT_TRUE(until_step(before + 2)) << trained.err();
  EXPECT_THAT(answer(job("stop")), HasSubstr("ends with code 75"));
  EXPECT_EQ(trained.wait(), 75) << trained.err();
  refused(job("status"), "no job of yours on this host writes there now");
}

TEST_F(ResizeCommand, NothingToGoOnFromIsRefused) {
  Command trained(
      train(run(), 1000000, Words{"-n", "2"} + set({"elastic.memory=off"})));
  ASSERT_TRUE(until_step(2)) << trained.err();
  refused(job("resize", {"1"}), "it saves no state that the new ranks could");
  EXPECT_EQ(ranks_of(trained).size(), 2u);
}

TEST_F(ResizeCommand, ACheckpointIsSavedWhenAsked) {
  Command trained(train(
      run(), 1000000,
      Words{"-n", "2"} + set({"checkpoint.every_steps=1000000"})));
  ASSERT_TRUE(until_step(2)) << trained.err();
  const fs::path saved = fs::path(run()) / "checkpoints";
  EXPECT_TRUE(list_checkpoints(saved).empty());
  answer(job("checkpoint"));
  EXPECT_TRUE(
      Command::until([&] { return list_checkpoints(saved).size() == 1; }));
  EXPECT_EQ(ranks_of(trained).size(), 2u);
}

}  // namespace echelon::resize_command_test
