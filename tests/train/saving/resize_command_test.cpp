// `echelon job`: a job that trains is asked, saved, stopped and resized.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "echelon/checkpoint/files/folder.h"
#include "echelon/cluster/local_cluster.h"
#include "echelon/text/format.h"
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

  /// The run has done these steps, with the losses of "one", which may have
  /// done more.
  void expect_each_step_once(int64_t number) const {
    const auto got = steps(run()), wanted = steps(run("one"));
    ASSERT_EQ(got.size(), static_cast<size_t>(number));
    ASSERT_GE(wanted.size(), got.size());
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(got[i].step, static_cast<int64_t>(i) + 1);
      ASSERT_NEAR(got[i].loss / wanted[i].loss, 1, 1e-10) << got[i].step;
    }
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
  expect_each_step_once(kSteps);
}

INSTANTIATE_TEST_SUITE_P(, Resized, testing::Bool(), [](const auto& info) {
  return info.param ? "OnDisk" : "InMemory";
});

// A host with `ranks` shares of a processor, as `echelon bench --save` keeps it
// in the folder `home`.
void save_measured(
    const std::string& home, const std::string& host, int ranks,
    const std::string& memory, const std::string& flops,
    const std::string& network = "0 B/s") {
  const fs::path path = fs::path(home) / "echelon" / "clusters" /
                        format("{}-{}.toml", host, ranks);
  fs::create_directories(path.parent_path());
  std::ofstream(path) << format(
      "name = \"desk\"\n[devices.cpu]\nmemory = \"{}\"\nmemory_rate = \"10 "
      "GB/s\"\npeak = {{ fp32 = \"{}\", fp64 = \"{}\" }}\nprocessor = "
      "true\n[[nodes]]\ndevice = \"cpu\"\ndevices = {}\ninside = {{ name = "
      "\"link\", rate = \"1 GB/s\", latency = \"20 us\" }}\nnetwork = {{ name "
      "= \"net\", rate = \"{}\", latency = \"20 us\" }}\n",
      memory, flops, flops, ranks, network);
}

// Each change is to the layout that `echelon plan` shows, also of all axes and
// the recompute at once.
TEST_F(ResizeCommand, TheLayoutIsThatOfThePlan) {
  constexpr int64_t kSteps = 150;
  constexpr auto kAtMost = 4 * testing_support::kHang;  // beside other programs
  const Words home = {
      "CUDA_VISIBLE_DEVICES=", "XDG_CONFIG_HOME=" + folder_.path()};
  // The name that this machine's file has.
  const std::string file = cluster::saved_cluster_path(1).filename().string();
  const std::string host = file.substr(0, file.rfind("-1.toml"));
  save_measured(folder_.path(), host, 1, "533 MiB", "0.05 TFLOP/s");
  save_measured(folder_.path(), host, 2, "2 GiB", "0.05 TFLOP/s");
  save_measured(folder_.path(), host, 3, "525 MiB", "0.05 TFLOP/s");
  save_measured(folder_.path(), host, 4, "2 GiB", "0.05 TFLOP/s");
  const std::string text = folder_.path() + "/text.txt";
  for (int i = 0; i < 8; ++i) {
    std::ofstream(text, std::ios::app) << testing_support::read_file(kDigits);
  }
  const Words settings = set(
      {"train.batch=20", "train.epochs=0",
       "train.steps=" + std::to_string(kSteps), "train.eval_every=1000000",
       "model.name=gpt", "model.layers=4", "model.hidden_size=32",
       "model.heads=4", "model.max_positions=64", "model.dtype=float64",
       "data.name=text", "data.sources=[\"" + text + "\"]",
       "data.tokenizer=bytes", "data.sequence=64", "data.holdout=0",
       "layout.microbatches=2", "checkpoint.at_end=false"});
  const auto command = [&](const std::string& run) {
    return Words{kEchelon, "train", kDigits} + settings +
           set({"train.run=" + run});
  };
  const Words layout = {"--layout", "fsdp=2,tp=2"};
  Command planned(
      Words{kEchelon, "plan", kDigits, "--elastic", "1:4", "--json"} + layout +
          settings,
      home);
  ASSERT_EQ(planned.wait(), 0) << planned.err();
  const auto table = nlohmann::json::parse(planned.out());
  std::vector<std::string> plans = {""};
  for (const auto& row : table.at("sizes")) plans.push_back(row.at("text"));
  EXPECT_THAT(
      plans, testing::ElementsAre(
                 "", "dp=1 recompute=all", "dp=2", "pp=3 recompute=all",
                 "fsdp=2,tp=2"));

  Command resized(command(run()) + layout, home);
  int before = 4;
  for (const int ranks : {3, 2, 1, 4}) {
    ASSERT_TRUE(until_step(steps(run()).size() + 2)) << resized.err();
    EXPECT_EQ(
        answer(job("resize", {std::to_string(ranks)})).substr(run().size()),
        format(
            ": from {} to {} ranks, {}\n", before, ranks,
            plans[static_cast<size_t>(ranks)]));
    // Before the ranks start, so that they have it.
    const std::string recompute = ranks == 3 || ranks == 1 ? "all" : "none";
    EXPECT_TRUE(Command::until([&] {
      const std::string text =
          testing_support::read_file(run() + "/config.toml");
      return text.find("\nrecompute = \"" + recompute + "\"\n") !=
             std::string::npos;
    })) << ranks;
    before = ranks;
  }
  ASSERT_EQ(resized.wait(kAtMost), 0) << resized.err();
  EXPECT_EQ(
      numbers_behind(resized.err(), ", from step "),
      numbers_behind(resized.out(), "stopped by SIGTERM after "));

  Command one(command(run("one")), home);
  ASSERT_EQ(one.wait(kAtMost), 0) << one.err();
  expect_each_step_once(kSteps);
}

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
  std::string resumed = jobs[1]->out();
  jobs[1] = start(1);
  until_steps_in("3");
  jobs[0]->signal(SIGKILL);
  until_steps_in("2");
  resumed += jobs[0]->out();
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

  for (const auto& job : jobs) resumed += job->out();
  // After each of the five changes, from where it was.
  const int from_memory = count(resumed, " in memory, saved");
  EXPECT_GE(count(resumed, "resumes from step "), 5) << resumed;
  EXPECT_EQ(from_memory, GetParam() ? 0 : count(resumed, "resumes from step "))
      << resumed;

  const auto got = steps(run());
  Command one(train(run("one"), kSteps));
  const std::string last = "\"step\":" + std::to_string(got.back().step) + ",";
  ASSERT_TRUE(Command::until([&] {
    return count(read_file(run("one") + "/metrics.jsonl"), last) > 0;
  })) << one.err();
  one.signal(SIGTERM);
  EXPECT_EQ(one.wait(), 75) << one.err();
  expect_each_step_once(got.back().step);
}

// The server of copies may be killed when memory is short. The job goes on
// meanwhile, and its next start has another server.
TEST_F(ResizeCommand, HostsShareTheirMemoryAgainWhenItsServerWasKilled) {
  constexpr int64_t kSteps = 1000000;  // until it is stopped
  const std::string port = std::to_string(testing_support::free_port());
  const auto start = [&](int host) {
    return std::make_unique<Command>(
        train(
            run(), kSteps,
            {"-n", "1", "--layout", "fsdp=2", "--nnodes", "2", "--node-rank",
             std::to_string(host), "--master-addr", "127.0.0.1",
             "--master-port", port}) +
        set({"elastic.memory_steps=1", "comm.backend=gloo"}));
  };
  const auto first = start(0), second = start(1);
  const auto kill_server = [](const Command& job) {
    for (const pid_t pid : job.living()) {
      const std::string path = "/proc/" + std::to_string(pid) + "/comm";
      if (read_file(path) != "echelon-memory\n") continue;
      return ::kill(pid, SIGKILL) == 0;
    }
    return false;
  };
  const auto go_on = [&] {
    ASSERT_TRUE(until_step(steps(run()).size() + 15))
        << first->err() << second->out() << second->err();
  };
  ASSERT_NO_FATAL_FAILURE(go_on());
  const auto resumed = [&] {
    return numbers_behind(first->out(), "resumes from step ");
  };
  // The last start reads from the server that the one before has brought.
  for (const size_t starts : {1, 2}) {
    ASSERT_TRUE(kill_server(starts == 1 ? *second : *first));
    const auto killed_at = static_cast<int>(steps(run()).size());
    ASSERT_NO_FATAL_FAILURE(go_on());
    ASSERT_EQ(::kill(ranks_of(*second).at(0), SIGKILL), 0) << second->err();
    ASSERT_TRUE(Command::until([&] {
      return count(first->err(), "restart ") >= static_cast<int>(starts);
    })) << first->err();
    ASSERT_NO_FATAL_FAILURE(go_on());
    ASSERT_EQ(resumed().size(), starts) << first->out() << first->err();
    // Copies have been made since.
    EXPECT_GE(resumed().back(), killed_at + 10);
  }
  first->signal(SIGTERM);
  EXPECT_EQ(first->wait(), 75) << first->err();
  EXPECT_EQ(second->wait(), 75) << second->err();
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
  expect_each_step_once(kSteps);
}

// Messages take longer than what a further host computes. So one that comes
// waits until another one is lost.
TEST_F(ResizeCommand, AHostThatWouldSlowTheJobDownIsASpare) {
  const testing_support::TestHosts hosts(3);
  if (!hosts.reason().empty()) GTEST_SKIP() << hosts.reason();
  for (const char* host : {"host0", "host1", "host2"}) {
    save_measured(folder_.path(), host, 1, "2 GiB", "50 TFLOP/s", "1 MB/s");
  }
  const auto start = [&](int host) {
    return std::make_unique<Command>(
        hosts.on(
            host, train(
                      run(), 1000000,
                      {"-n", "1", "--layout", "dp=3", "--nnodes", "1:3",
                       "--node-rank", std::to_string(host), "--master-addr",
                       hosts.address(0)}) +
                      set({"checkpoint.every_steps=10", "comm.backend=gloo"})),
        Words{"CUDA_VISIBLE_DEVICES=", "XDG_CONFIG_HOME=" + folder_.path()});
  };
  std::vector<std::unique_ptr<Command>> jobs;
  for (int host = 0; host < 2; ++host) jobs.push_back(start(host));
  const auto all_err = [&] {
    std::string text;
    for (const auto& job : jobs) text += job->err() + "--\n";
    return text;
  };
  ASSERT_TRUE(until_step(15)) << all_err();
  jobs.push_back(start(2));
  ASSERT_TRUE(Command::until([&] {
    return jobs[0]->err().find(
               "a host that has come waits as a spare: a step "
               "is predicted to take ") != std::string::npos;
  })) << all_err();
  ASSERT_TRUE(until_step(steps(run()).size() + 15)) << all_err();
  EXPECT_THAT(ranks_of(*jobs[2]), testing::IsEmpty());
  jobs[1]->signal(SIGKILL);
  ASSERT_TRUE(Command::until([&] { return !ranks_of(*jobs[2]).empty(); }))
      << all_err();
  ASSERT_TRUE(until_step(steps(run()).size() + 15)) << all_err();
  EXPECT_EQ(ranks_of(*jobs[0]).size() + ranks_of(*jobs[2]).size(), 2u);
  Command stop(hosts.on(0, job("stop")));
  EXPECT_EQ(stop.wait(), 0) << stop.err();
  EXPECT_EQ(jobs[0]->wait(), 75) << all_err();
  EXPECT_EQ(jobs[2]->wait(), 75) << all_err();
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
  refused(job("stop"), "now; the last one was process ");
}

// What a job of another host is asked reaches it by ssh: where its folder says
// that it is, or by the name that the user gives. The stand-in for ssh enters
// the test host.
TEST_F(ResizeCommand, AJobIsAskedFromAnotherHostBySsh) {
  const testing_support::TestHosts hosts(1);
  if (!hosts.reason().empty()) GTEST_SKIP() << hosts.reason();
  std::string enter = "#!/bin/sh\necho $1 >>" + folder_.path() +
                      "/reached\n[ $1 = nowhere ] && { echo no route >&2; exit "
                      "255; }\nshift; exec";
  for (const auto& word : hosts.on(0, {"sh", "-c"})) enter += " '" + word + "'";
  const Words ssh = {"--ssh", folder_.script("agent", enter + " \"$*\"\n")};
  Command trained(hosts.on(0, train(run(), 1000000, {"-n", "2"})));
  ASSERT_TRUE(until_step(2)) << trained.err();
  EXPECT_THAT(answer(job("status", ssh)), HasSubstr(": 2 ranks, dp=2, step "));
  EXPECT_EQ(read_file(folder_.path() + "/reached"), "host0\n");
  EXPECT_THAT(
      answer(job("checkpoint", ssh + Words{"--host", "ann@other"})),
      HasSubstr(run() + ": "));
  EXPECT_THAT(
      read_file(folder_.path() + "/reached"), testing::EndsWith("ann@other\n"));
  refused(job("resize", Words{"5"} + ssh), "no layout of 5 ranks fits");
  refused(
      job("stop", ssh + Words{"--host", "nowhere"}),
      "nowhere` failed: no route");
  refused(job("stop", ssh + Words{"--host=-oProxyCommand=x"}), "is no name of");
  EXPECT_THAT(
      answer(job("resize", Words{"1"} + ssh)),
      HasSubstr(": from 2 to 1 ranks, dp=1\n"));
  ASSERT_TRUE(Command::until([&] {
    Command asked(job("status", ssh));
    asked.wait();
    return asked.out().find(": 1 rank, dp=1, step ") != std::string::npos;
  })) << trained.err();
  EXPECT_THAT(answer(job("stop", ssh)), HasSubstr("ends with code 75"));
  EXPECT_EQ(trained.wait(), 75) << trained.err();
  // It has ended, so that host has no job either, and asks nobody.
  refused(job("stop", ssh), "no job of yours on this host writes there now");
}

// The words that kubectl gets, and that its answer and its code are passed on.
TEST_F(ResizeCommand, AJobInAPodIsAskedByKubectl) {
  folder_.script(
      "kubectl",
      "#!/bin/bash\necho \"$@\" >>" + folder_.path() +
          "/words\ncase \"$*\" in *gone*) echo 'Error from server (NotFound): "
          "no pod' >&2; exit 1;; *) echo answer; exit 3;; esac\n");
  const auto ask = [&](const Words& words) {
    fs::remove(folder_.path() + "/words");
    return std::make_unique<Command>(
        Words{"env", "PATH=" + folder_.path() + ":/usr/bin:/bin"} + words);
  };
  const auto told = [&] { return read_file(folder_.path() + "/words"); };
  auto named =
      ask(job("resize", {"3", "--pod", "job/first", "--namespace", "vision"}));
  EXPECT_EQ(named->wait(), 3) << named->err();
  EXPECT_EQ(named->out(), "answer\n");
  EXPECT_EQ(
      told(),
      "exec --namespace vision job/first -- env ECHELON_ASKED=1 echelon job "
      "resize " +
          run() + " 3\n");
  // By what the job has written into its folder, which has another path there.
  Command trained(
      Words{"env", "POD_NAME=first-0-x7k2p", "POD_NAMESPACE=vision"} +
      train(run(), 2, {"-n", "1"}));
  ASSERT_EQ(trained.wait(), 0) << trained.err();
  const std::string moved = run("elsewhere");
  fs::rename(run(), moved);
  auto status = ask({program("echelon"), "job", "status", moved, "--json"});
  EXPECT_EQ(status->wait(), 3) << status->err();
  EXPECT_EQ(
      told(),
      "exec --namespace vision first-0-x7k2p -- env ECHELON_ASKED=1 echelon "
      "job status " +
          run() + " --json\n");
  auto gone = ask(job("stop", {"--pod", "gone"}));
  EXPECT_EQ(gone->wait(), 2);
  EXPECT_THAT(gone->err(), HasSubstr("--pod gone: Error from server"));
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
