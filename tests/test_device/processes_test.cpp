// `echelon train` with its ranks as processes on the test device: what it
// writes, how it is stopped, and how it ends when a rank, a card or a
// collective fails.
#include <gmock/gmock.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "echelon/checkpoint/files/folder.h"
#include "echelon/checkpoint/files/reader.h"
#include "echelon/timeline/metrics.h"
#include "tests/support/error_text.h"
#include "tests/support/process.h"
#include "tests/train/trained_command.h"

namespace echelon::processes_test {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing_support::Command;
using testing_support::read_file;
using testing_support::TempFolder;

class ProcessesOnTheTestDevice : public testing::Test {
 protected:
  std::string run(const std::string& name = "run") const {
    return folder_.path() + "/" + name;
  }
  /// A small gpt on two ranks.
  Words train(
      int64_t steps, const Words& settings = {},
      const std::string& name = "run") const {
    const std::string config = folder_.path() + "/job.toml";
    std::ofstream(folder_.path() + "/text.txt") << text_;
    std::ofstream(config)
        << "[model]\nname = \"gpt\"\nlayers = 2\nhidden_size = 20\n"
           "heads = 5\nmax_positions = 16\n"
           "[data]\nname = \"text\"\ntokenizer = \"bytes\"\nsequence = 16\n"
           "sources = [\""
        << folder_.path()
        << "/text.txt\"]\n[train]\nbatch = 8\nlog_every = 1\n"
           "eval_every = 4\n[optimizer]\nclip_norm = 1.0\n";
    return Words{kEchelon, "train", config} +
           set(
               {"train.run=" + run(name),
                "train.steps=" + std::to_string(steps)}) +
           set(settings);
  }
  /// As train(), on the device.
  Words on_device(int64_t steps, const Words& settings) const {
    return train(steps, settings + Words{"comm.device=test"});
  }
  Words environment(const Words& more = {}) const {
    return Words{"ECHELON_TEST_DEVICE_REPORTS=" + reports()} + more;
  }
  std::string reports() const { return folder_.path() + "/reports.txt"; }
  void expect_no_reports() const { EXPECT_EQ(read_file(reports()), ""); }

  std::vector<CheckpointPlace> checkpoints() const {
    return list_checkpoints(fs::path(run()) / "checkpoints");
  }
  void expect_whole_checkpoints() const {
    ASSERT_FALSE(checkpoints().empty());
    for (const auto& place : checkpoints()) {
      for (const auto& damage : verify_checkpoint(place.path.string())) {
        ADD_FAILURE() << damage.what;
      }
    }
  }
  std::vector<timeline::StepMetrics>
  steps(const std::string& name = "run") const {
    const fs::path file = fs::path(run(name)) / "metrics.jsonl";
    if (!fs::exists(file)) return {};
    return timeline::read_metrics(file).steps;
  }
  /// A job that `fault` (device.h) ends; it says all of `said`.
  template <typename... Said>
  void ends_by(
      const std::string& fault, const Words& settings, const Said&... said) {
    Command job(
        on_device(1000000, Words{"layout.fsdp=2"} + settings) +
            Words{"--max-restarts", "0"},
        environment({"ECHELON_TEST_DEVICE_FAULT=" + fault}));
    EXPECT_EQ(job.wait(), 1);
    EXPECT_THAT(job.err(), HasAll(said...));
    EXPECT_TRUE(Command::until([&] { return job.living().empty(); }));
  }

  TempFolder folder_;
  const std::string text_ = [] {
    std::string text;
    for (int i = 0; i < 400; ++i) text += std::to_string(i * i) + " ";
    return text;
  }();
};

// The host queues the work of a step; its parts are timed on the device.
TEST_F(ProcessesOnTheTestDevice, TellHowLongThePartsOfAStepTook) {
  Command job(
      on_device(
          4, {"layout.pp=2", "layout.microbatches=4", "train.log=[\"otlp\"]"}),
      environment());
  ASSERT_EQ(job.wait(), 0) << job.err();
  const auto all = steps();
  ASSERT_EQ(all.size(), 4u);
  for (const auto& step : all) {
    EXPECT_GT(step.forward_seconds.value_or(0), 0);
    EXPECT_GT(step.backward_seconds.value_or(0), 0);
    EXPECT_GT(step.update_seconds.value_or(0), 0);
    EXPECT_FALSE(step.communication_seconds);
  }
  std::map<std::string, int> named;
  std::istringstream lines(read_file(run() + "/otlp/traces.jsonl"));
  for (std::string line; std::getline(lines, line);) {
    const auto request = nlohmann::json::parse(line);
    for (const auto& span :
         request["resourceSpans"][0]["scopeSpans"][0]["spans"]) {
      ++named[span.at("name")];
      EXPECT_LE(
          std::stoll(span.at("startTimeUnixNano").get<std::string>()),
          std::stoll(span.at("endTimeUnixNano").get<std::string>()));
    }
  }
  for (const char* part : {"step", "data", "forward", "backward", "update"}) {
    EXPECT_EQ(named[part], 4) << part;
  }
  expect_no_reports();
}

// Data come through pinned memory, losses leave it a step later, a snapshot is
// taken beside training, and the report is written at the end.
TEST_F(ProcessesOnTheTestDevice, TrainEvaluateSaveAndSampleAsOnCpus) {
  const Words settings = {"layout.fsdp=2", "checkpoint.every_steps=2"};
  Command device(on_device(6, settings), environment());
  ASSERT_EQ(device.wait(), 0) << device.err();
  Command cpu(train(6, settings, "cpu"));
  ASSERT_EQ(cpu.wait(), 0) << cpu.err();
  const auto there = steps(), here = steps("cpu");
  ASSERT_EQ(there.size(), 6u);
  ASSERT_EQ(here.size(), 6u);
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_NEAR(there[i].loss, here[i].loss, 1e-5 * here[i].loss);
    EXPECT_FALSE(there[i].slowest_rank);  // the host's times say nothing
    EXPECT_NEAR(*there[i].grad_norm, *here[i].grad_norm, 1e-4);
  }
  const auto held_out = [&](const std::string& name) {
    return timeline::read_metrics(fs::path(run(name)) / "metrics.jsonl")
        .evaluations.back()
        .loss;
  };
  EXPECT_NEAR(held_out("run"), held_out("cpu"), 1e-5 * held_out("cpu"));
  EXPECT_TRUE(fs::exists(run() + "/report.html"));
  expect_whole_checkpoints();
  EXPECT_EQ(checkpoints().front().step, 6);
  const auto text_of = [&](const std::string& name) {
    Command sample(
        {kEchelon, "sample", run(name), "--prompt", "1 4 ", "--tokens", "12",
         "--temperature", "0"},
        environment());
    EXPECT_EQ(sample.wait(), 0) << sample.err();
    return sample.out();
  };
  EXPECT_EQ(text_of("run"), text_of("cpu"));
  expect_no_reports();
}

TEST_F(ProcessesOnTheTestDevice, SigtermSavesAndCpusResume) {
  Command job(on_device(1000000, {"layout.pp=2"}), environment());
  ASSERT_TRUE(Command::until([&] { return steps().size() > 5; })) << job.err();
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 75) << job.err();
  ASSERT_EQ(checkpoints().size(), 1u);
  const int64_t step = checkpoints()[0].step;
  EXPECT_EQ(steps().back().step, step);
  EXPECT_TRUE(fs::exists(run() + "/report.html"));
  expect_no_reports();
  Command resumed(train(step + 2, {"layout.dp=2"}));
  ASSERT_EQ(resumed.wait(), 0) << resumed.err();
  EXPECT_THAT(
      resumed.out(), HasSubstr("resumes from step " + std::to_string(step)));
  EXPECT_EQ(steps().size(), static_cast<size_t>(step + 2));
}

TEST_F(ProcessesOnTheTestDevice, ARankThatDiesEndsTheJob) {
  Command job(
      on_device(1000000, {"layout.fsdp=2", "checkpoint.every_steps=2"}) +
          Words{"--max-restarts", "0"},
      environment());
  ASSERT_TRUE(Command::until([&] { return checkpoints().size() >= 2; }))
      << job.err();
  const auto ranks = ranks_of(job);
  ASSERT_EQ(ranks.size(), 2u);
  kill(ranks[1], SIGKILL);
  EXPECT_EQ(job.wait(), 137) << job.err();
  EXPECT_THAT(job.err(), HasSubstr(" ended with SIGKILL"));
  EXPECT_TRUE(Command::until([&] { return job.living().empty(); }));
  expect_whole_checkpoints();
}

// An error of queued work is thrown by a later call of the host: in a step
// whose spans are being timed, and in one after those.
TEST_F(ProcessesOnTheTestDevice, ACardThatFailsEndsTheJobAndIsNamed) {
  for (const char* fault : {"error 1 4000", "error 1 12000"}) {
    ends_by(
        fault, {"checkpoint.every_steps=1"},
        "rank 1: ", "an illegal memory access was encountered (test:1 of ");
    expect_whole_checkpoints();
    fs::remove_all(run());
  }
}

TEST_F(ProcessesOnTheTestDevice, WorkThatNeverEndsIsReportedByTheTimeout) {
  ends_by(
      "hang 1 2000", {"comm.timeout=3s"}, "failed after 3",
      "the device has not finished it in time");
}

TEST_F(ProcessesOnTheTestDevice, RanksThatCannotConnectSayWhyAndWhatToTry) {
  ends_by(
      "connect 1", {},
      "rank 1 on test:1 cannot connect to ranks 0, 1 over NCCL: "
      "socketPollConnect: connect to 10.0.0.7<40123> returned Connection timed "
      "out, exceeded error retry count after 35 attempts; NCCL_DEBUG=INFO");
}

// What an hour on a machine with GPUs begins with, on two devices that are not
// there.
TEST_F(ProcessesOnTheTestDevice, AFirstHourOnANodeIsOnOnePage) {
  const std::string build = fs::path(program("")).parent_path().parent_path();
  const std::string out = folder_.path() + "/node";
  Command job(
      {"python3", source_path("benchmarks/gpu_node.py"), "--build", build,
       "--out", out, "--gpus", "2", "--device", "test", "--small", "--only",
       "verify tp|train fsdp|compare|stop|kill"},
      environment());
  EXPECT_EQ(job.wait(), 0) << job.out() << job.err();
  const std::string page = read_file(out + "/index.html");
  EXPECT_THAT(
      page, HasAll(
                "5 checks, 0 failed", "ms a step", "exit code 75 after",
                "next checkpoint after", "runs/fsdp=2/report.html"));
  EXPECT_TRUE(fs::exists(out + "/compare.html"));
  expect_no_reports();
}

}  // namespace echelon::processes_test
