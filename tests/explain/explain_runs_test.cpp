// Real runs that are made to have a fault, and one that has none. This machine
// may be busy with other things, so that a run can have more than the fault
// that it is made with: that one has to be found. Faults are made on CPUs and
// on the tests' device, where spans and collectives are timed by its events.
#include <gmock/gmock.h>

#include <sys/types.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <set>
#include <thread>

#include "echelon/explain/explain.h"
#include "echelon/explain/run_record.h"
#include "echelon/timeline/chrome_trace.h"
#include "echelon/timeline/overlap.h"
#include "tests/data/make_image.h"
#include "tests/support/places.h"
#include "tests/support/process.h"

namespace echelon::explain::explain_runs_test {

using testing::Contains;
using testing::ElementsAre;
using testing_support::Command;
using testing_support::TempFolder;
using Words = std::vector<std::string>;

const std::string kEchelon = program("echelon");

class ExplainRuns : public testing::Test {
 protected:
  // simple_cnn on random images, and what `settings` changes.
  RunExplanation trained(
      Words settings, const Words& more = {},
      const std::function<void(const Command&)>& meanwhile = {}) {
    const std::string config = folder_.path() + "/config.toml";
    std::ofstream(config) << "[data]\nname = \"dummy\"\nshape = [3, 32, 32]\n"
                             "holdout = 0\n[train]\nsteps = 25\nthreads = 1\n"
                             "overwrite = true\n[checkpoint]\nat_end = false\n";
    const std::string run = folder_.path() + "/run";
    Words words = {kEchelon, "train", config, "--set", "train.run=" + run};
    if (!device_.empty()) settings.push_back("comm.device=" + device_);
    for (const auto& setting : settings) {
      words.insert(words.end(), {"--set", setting});
    }
    words.insert(words.end(), more.begin(), more.end());
    Command command(words);
    if (meanwhile) meanwhile(command);
    failure_ = command.wait() == 0 ? "" : "failed: " + command.err();
    return failure_.empty() ? explain_run(run) : RunExplanation{};
  }
  void TearDown() override { EXPECT_EQ(failure_, ""); }

  // The finding of this fault; an empty one with a failure when there is none.
  static RunFinding find(const RunExplanation& run, Fault fault) {
    for (const auto& found : run.findings) {
      if (found.fault == fault) return found;
    }
    ADD_FAILURE() << told(run);
    return {};
  }

  static std::string told(const RunExplanation& run) {
    std::string text;
    for (const auto& found : run.findings) {
      text += std::string(to_string(found.fault)) + ": " +
              found.reason.diagnosis + "\n";
    }
    return text.empty() ? "nothing was found" : text;
  }

  TempFolder folder_;
  std::string device_;   // empty: the CPU
  std::string failure_;  // of the last run
};

class ExplainFaults : public ExplainRuns,
                      public testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override { device_ = GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(
    Devices, ExplainFaults, testing::Values("", "test"),
    [](const auto& info) { return *info.param == 0 ? "cpu" : info.param; });

// Leaves the quickest steps in the timeline: those in which the machine did
// little else.
void keep_quickest(const std::filesystem::path& timeline, size_t count) {
  timeline::Timeline all = timeline::read_chrome_trace(timeline);
  std::vector<std::pair<int64_t, int64_t>> steps;  // how long, which
  for (const auto& [step, window] :
       timeline::step_windows(timeline::step_activities(all))) {
    steps.emplace_back(window.end - window.begin, step);
  }
  ASSERT_GT(steps.size(), 2 * count);
  std::ranges::sort(steps);
  std::set<int64_t> kept;
  for (size_t i = 0; i < count; ++i) kept.insert(steps[i].second);
  std::erase_if(all.spans, [&](const timeline::Span& span) {
    return !kept.contains(span.step);
  });
  timeline::write_chrome_trace(timeline, all);
}

// Other programs on a machine hold any run back, which is reported. The steps
// that they held back least have no finding, on a very busy machine in one run
// of five.
TEST_F(ExplainRuns, AHealthyOne) {
  RunExplanation run;
  for (int tries = 0; tries < 5; ++tries) {
    run = trained(
        {"data.shape=[3, 64, 64]", "train.steps=70", "train.timeline_steps=60"},
        {"-n", "2"});
    EXPECT_EQ(run.ranks, 2);
    EXPECT_GT(run.recorded_steps, 40);  // without outliers
    keep_quickest(folder_.path() + "/run/timeline.json", 12);
    run = explain_run(folder_.path() + "/run");
    EXPECT_EQ(run.recorded_steps, 12);
    if (run.findings.empty()) return;
  }
  ADD_FAILURE() << told(run);
}

TEST_F(ExplainRuns, ArriveOnTheRunsPage) {
  const RunExplanation run = trained({"train.batch=2", "model.name=mlp"});
  const std::string page =
      testing_support::read_file(folder_.path() + "/run/report.html");
  EXPECT_THAT(page, testing::HasSubstr("What held the run back"));
  for (const auto& found : run.findings) {
    EXPECT_THAT(page, testing::HasSubstr(std::string(to_string(found.fault))));
  }
}

TEST_P(ExplainFaults, ASlowLoader) {
  const std::string images = folder_.path() + "/images/";
  for (const char* of_class : {"a", "b"}) {
    std::filesystem::create_directories(images + of_class);
    for (int i = 0; i < 8; ++i) {
      std::ofstream(
          images + of_class + "/" + std::to_string(i) + ".jpg",
          std::ios::binary)
          << make_jpeg(2000, 2000);
    }
  }
  const auto run = trained(
      {"data.name=images", "data.path=" + images, "data.image_size=32",
       "data.workers=1", "train.batch=8"});
  const auto found = find(run, Fault::data_loading);
  EXPECT_EQ(run.findings.front().fault, Fault::data_loading);
  EXPECT_GT(found.share, 0.5);
  EXPECT_GT(found.gain, 0.3);
  EXPECT_THAT(found.settings, Contains(testing::StartsWith("data.workers=")));
}

// The process of rank 1, once it is there.
pid_t rank_one(const Command& command) {
  pid_t found = -1;
  Command::until([&] {
    for (const pid_t pid : command.living()) {
      std::ifstream file("/proc/" + std::to_string(pid) + "/environ");
      for (std::string line; std::getline(file, line, '\0');) {
        if (line == "RANK=1") found = pid;
      }
    }
    return found > 0;
  });
  return found;
}

TEST_P(ExplainFaults, ARankThatIsSlowedDown) {
  const auto run = trained(
      {device_.empty() ? "data.shape=[3, 64, 64]" : "data.shape=[3, 48, 48]"},
      {"-n", "2"}, [](const Command& command) {
        const pid_t rank = rank_one(command);
        ASSERT_GT(rank, 0);
        // It stands still nine tenths of the time, in each step, until it has
        // ended. On a busy machine it is stopped later than it should be, and
        // then stands still longer.
        using Clock = std::chrono::steady_clock;
        Clock::duration ran = std::chrono::milliseconds(2);
        while (::kill(rank, SIGSTOP) == 0) {
          std::this_thread::sleep_for(9 * ran);
          const auto begin = Clock::now();
          ::kill(rank, SIGCONT);
          std::this_thread::sleep_for(std::chrono::milliseconds(2));
          ran = Clock::now() - begin;
        }
      });
  const auto found = find(run, Fault::straggler);
  EXPECT_THAT(found.ranks, ElementsAre(1));
  EXPECT_GT(found.share, 0.08);
}

TEST_P(ExplainFaults, UnevenStages) {
  const auto found = find(
      trained(
          {"model.cut=[\"fc\"]", "layout.microbatches=8", "train.batch=256"},
          {"--layout", "pp=2"}),
      Fault::stage_imbalance);
  EXPECT_THAT(found.ranks, ElementsAre(0));
  EXPECT_THAT(
      found.settings,
      ElementsAre("model.cut=[]", "model.balance=\"measured\""));
}

TEST_P(ExplainFaults, APipelineWithOneMicrobatch) {
  const auto found = find(
      trained(
          {"model.name=mlp", "model.hidden=[512, 512, 512, 512, 512, 512, 512]",
           "data.shape=[2, 16, 16]", "train.batch=256",
           "layout.microbatches=1"},
          {"--layout", "pp=2"}),
      Fault::bubble);
  EXPECT_GT(found.share, 0.25);
  EXPECT_EQ(found.gain_source, GainSource::simulated);
  EXPECT_GT(found.gain, 0.1);
}

TEST_P(ExplainFaults, GradientsThatNothingHides) {
  Words settings = {"model.name=mlp", "model.hidden=[2048]", "train.batch=4"};
  if (device_.empty()) settings.push_back("comm.backend=gloo");
  const auto found =
      find(trained(settings, {"-n", "2"}), Fault::exposed_communication);
  EXPECT_EQ(found.axis, "dp");
  EXPECT_FALSE(found.settings.empty());
}

TEST_P(ExplainFaults, RecomputeWithMemoryToSpare) {
  const auto found = find(
      trained({"memory.recompute=all", "data.shape=[3, 64, 64]"}),
      Fault::recompute);
  EXPECT_GT(found.share, 0.1);
  EXPECT_GT(found.gain, 0.05);
  EXPECT_THAT(found.settings, ElementsAre("memory.recompute=\"none\""));
}

TEST_P(ExplainFaults, MemoryNearItsLimit) {
  trained({});
  const RunRecord free = read_run(folder_.path() + "/run");
  ASSERT_EQ(free.timeline.memory.size(), 1u);
  int64_t peak = 0;
  for (const auto& sample : free.timeline.memory[0].samples) {
    peak = std::max(peak, sample.memory.total());
  }
  // The first steps, which are not recorded, may hold a little more.
  RunExplanation run;
  for (const int64_t percent : {103, 104, 105, 106, 107}) {
    const int64_t limit = peak * percent / 100;
    run = trained({"memory.limit_bytes=" + std::to_string(limit)});
    if (failure_.empty()) break;
  }
  const auto found = find(run, Fault::memory_pressure);
  EXPECT_THAT(found.ranks, ElementsAre(0));
  EXPECT_FALSE(found.settings.empty());
}

TEST_P(ExplainFaults, RanksWithDifferentNumbersOfSamples) {
  const auto found = find(
      trained(
          {"data.shape=[3, 64, 64]", "train.rank_batch=[56, 8]"}, {"-n", "2"}),
      Fault::rank_imbalance);
  EXPECT_GT(found.share, 0.15);
  EXPECT_THAT(found.settings, ElementsAre("train.rank_batch=[]"));
}

// The run has no timeline: its metrics are explained, and the one step that it
// may have recorded to be watched.
TEST_F(ExplainRuns, OneThatIsKilled) {
  const std::string run = folder_.path() + "/run";
  const std::string config = folder_.path() + "/config.toml";
  std::ofstream(config) << "[data]\nname = \"dummy\"\nshape = [3, 32, 32]\n"
                           "[train]\nsteps = 100000\nthreads = 1\n";
  Command command({kEchelon, "train", config, "--set", "train.run=" + run});
  ASSERT_TRUE(Command::until([&] {
    std::ifstream metrics(run + "/metrics.jsonl");
    return std::count(std::istreambuf_iterator<char>(metrics), {}, '\n') > 8;
  }));
  command.signal(SIGKILL);
  command.wait();
  const RunExplanation killed = explain_run(run);
  EXPECT_LE(killed.recorded_steps, 1);
  EXPECT_GT(killed.step_seconds, 0);
  EXPECT_THAT(
      killed.notes, Contains(testing::HasSubstr("there is no timeline.json")));
  EXPECT_THAT(killed.notes, Contains(testing::HasSubstr(" of 100000: ")));
}

TEST_P(ExplainFaults, TinyBatches) {
  const auto found = find(
      trained(
          {"model.name=mlp", "model.hidden=[1024, 1024]", "train.batch=1",
           "data.shape=[1, 16, 16]"}),
      Fault::small_batch);
  EXPECT_THAT(found.settings, ElementsAre("train.batch=8"));
  EXPECT_GT(found.gain, 0.5);
}

}  // namespace echelon::explain::explain_runs_test
