// The command line with its real training program, as users run it.
#include <gmock/gmock.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "echelon/cluster/local_cluster.h"
#include "echelon/text/text_file.h"
#include "echelon/text/units.h"
#include "echelon/timeline/chrome_trace.h"
#include "echelon/timeline/metrics.h"
#include "tests/support/error_text.h"
#include "tests/support/measured_desk.h"
#include "tests/support/process.h"
#include "tests/support/test_hosts.h"
#include "tests/train/trained_command.h"

namespace echelon::command_test {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;
using testing_support::Command;
using testing_support::TempFolder;
using testing_support::TestHosts;

TEST(VerifyCommand, ADifferenceIsTheLastLine) {
  Command differ(
      {kEchelon, "verify", kDigits, "-n", "2", "--steps", "1",
       "--plant-error"});
  EXPECT_EQ(differ.wait(), 1);
  const std::string out = differ.out();
  EXPECT_THAT(
      out.substr(out.rfind('\n', out.size() - 2) + 1),
      StartsWith("DIFFERENT: "));
  EXPECT_EQ(differ.err(), "");
}

// Rank 0 serves the store, which the others ask when a collective times out.
TEST(TrainCommand, ARankZeroThatHangsEndsTheJob) {
  TempFolder folder;
  const std::string run = folder.path() + "/run";
  Command job(
      train_digits(run, 1000000) + Words{"-n", "2", "--max-restarts", "0"} +
      set({"comm.backend=gloo", "comm.timeout=4s"}));
  ASSERT_TRUE(Command::until([&] {
    std::error_code error;
    return fs::file_size(run + "/metrics.jsonl", error) > 1000 && !error;
  }));
  kill(ranks_of(job).front(), SIGSTOP);
  EXPECT_EQ(job.wait(), 1);
  EXPECT_THAT(
      job.err(), AllOf(
                     HasSubstr("rank 0 was stopped by SIGSTOP"),
                     HasSubstr("rank 1: all_reduce"),
                     HasSubstr("(served by rank 0) has not answered within "
                               "5 s: its process hangs")));
  EXPECT_TRUE(job.living().empty());
}

// Ranks that wait for one that has died have nothing to save.
TEST(TrainCommand, ARankThatStillMeetsOthersEndsAtOnce) {
  const auto catches_sigterm = [](const Command& rank) {
    const std::string status = testing_support::read_file(
        "/proc/" + std::to_string(rank.pid()) + "/status");
    const size_t at = status.find("SigCgt:\t");
    return at != std::string::npos &&
           (std::stoull(status.substr(at + 8), nullptr, 16) >> (SIGTERM - 1) &
            1) != 0;
  };
  for (const auto& [signal, code] :
       {std::pair(SIGTERM, 75), std::pair(SIGINT, 130)}) {
    Command rank(
        {program("echelon-train"), "train", kDigits},
        {"RANK=1", "WORLD_SIZE=2", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=2",
         "MASTER_ADDR=127.0.0.1", "MASTER_PORT=1"});
    ASSERT_TRUE(Command::until([&] { return catches_sigterm(rank); }));
    rank.signal(signal);
    EXPECT_EQ(rank.wait(std::chrono::seconds(30)), code) << rank.err();
  }
}

TEST(TrainCommand, ARankThatIsStoppedIsStartedAgain) {
  TempFolder folder;
  Command job(train_digits(folder.path() + "/run", 1000000) + Words{"-n", "2"});
  ASSERT_TRUE(Command::until([&] { return ranks_of(job).size() == 2; }));
  kill(ranks_of(job)[1], SIGSTOP);
  ASSERT_TRUE(Command::until([&] {
    return job.err().find("restart 1 of 3") != std::string::npos;
  })) << job.err();
  EXPECT_THAT(
      job.err(),
      HasSubstr("rank 1: was stopped by SIGSTOP and not continued for 3 s"));
}

TEST(TrainCommand, ARankThatHangsIsStartedAgain) {
  TempFolder folder;
  Command job(
      {kEchelon, "run", "-n", "2", "--max-restarts", "1", "--",
       test_program("troubled_train"), folder.path(), "hangs"});
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(
      job.err(), AllOf(
                     HasSubstr("rank 1: hangs: no rank has made progress"),
                     HasSubstr("restart 1 of 1")));
}

// It goes on from a checkpoint of before the fault.
TEST(TrainCommand, AFlippedBitOfAReplicaStartsAgainFromBefore) {
  TempFolder folder;
  const auto train = [&](const std::string& name, const std::string& trouble) {
    const std::string run = folder.path() + "/" + name;
    fs::create_directory(run);
    Command job(
        {kEchelon, "run", "-n", "3", "--max-restarts", "1", "--",
         test_program("troubled_train"), run, trouble});
    EXPECT_EQ(job.wait(), 0) << job.err();
    return job.err();
  };
  EXPECT_THAT(
      train("flipped", "flips"),
      HasAll(
          "step 10: the parameters of rank 1 differ from those of ranks 0 and "
          "2, which agree: head.weight",
          "They were equal after step 6", "The newest checkpoint, ",
          "step-00000006, is from before", "restart 1 of 1"));
  EXPECT_EQ(train("whole", "none"), "");
  const auto losses = [&](const std::string& name) {
    std::vector<double> all;
    const auto path = folder.path() + "/" + name + "/metrics.jsonl";
    for (const auto& step : timeline::read_metrics(path).steps) {
      all.push_back(step.loss);
    }
    return all;
  };
  EXPECT_EQ(losses("flipped"), losses("whole"));
  EXPECT_EQ(losses("whole").size(), 20u);
}

// Ctrl-S in a terminal does the same.
TEST(TrainCommand, WaitsForASlowReader) {
  TempFolder folder;
  const std::string run = folder.path() + "/run";
  Words words = {
      "sh", "-c", "\"$@\" | { sleep 5; cat > " + folder.path() + "/out; }",
      "sh"};
  Command job(
      words + train_digits(run, 2500) + Words{"-n", "2"} +
      set({"train.log_every=1", "train.batch=8"}));
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(job.err().find("restart"), std::string::npos) << job.err();
  EXPECT_THAT(
      testing_support::read_file(folder.path() + "/out"),
      HasSubstr("step 2500/2500"));
}

TEST(TrainCommand, GoesOnWhenNobodyReads) {
  TempFolder folder;
  const std::string run = folder.path() + "/run";
  Command job(
      Words{"bash", "-c", "\"$@\" | head -1; exit ${PIPESTATUS[0]}", "bash"} +
      train_digits(run, 60) + Words{"-n", "2"});
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(timeline::read_metrics(run + "/metrics.jsonl").steps.size(), 60u);
  EXPECT_TRUE(fs::exists(run + "/report.html"));
}

TEST(TrainCommand, OneStepIsCountedAsOne) {
  TempFolder folder;
  Command job(train_digits(folder.path() + "/run", 1));
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(job.out(), HasSubstr(" % after 1 step\n"));
  Command same(
      {kEchelon, "verify", kDigits, "-n", "2", "--steps", "1", "--set",
       "optimizer.warmup_steps=0"});
  EXPECT_EQ(same.wait(), 0) << same.err();
  EXPECT_THAT(same.out(), HasSubstr(" comparisons over 1 step, largest"));
}

// A model that fits into no such host is refused before it is built.
TEST(Memory, OffloadToAHostThatHasTooLittleIsRefused) {
  TempFolder folder;
  std::ofstream(folder.path() + "/text.txt") << std::string(5000, 'a');
  std::ofstream(folder.path() + "/job.toml")
      << "[model]\nname = \"gpt\"\nlayers = 96\nhidden_size = 12288\nheads = "
         "96\n"
         "max_positions = 64\n"
         "[data]\nname = \"text\"\nsources = [\""
      << folder.path()
      << "/text.txt\"]\n"
         "tokenizer = \"bytes\"\nsequence = 64\n[layout]\nfsdp = 2\n"
         "[memory]\noffload = \"parameters\"\n[train]\nsteps = 1\nbatch = 2\n"
         "run = \""
      << folder.path() << "/run\"\n";
  Command job({kEchelon, "train", folder.path() + "/job.toml", "-n", "2"});
  EXPECT_EQ(job.wait(), 2);
  EXPECT_THAT(
      job.err(),
      HasSubstr("[memory] offload = \"parameters\": the 2 ranks of this host "
                "need "));
}

TEST(Memory, ALimitBelowThePlanIsRefusedBeforeRanksStart) {
  TempFolder folder;
  const std::string run = folder.path() + "/run";
  Command job(train_digits(run, 2) + set({"memory.limit_bytes=100000"}));
  EXPECT_EQ(job.wait(), 2);
  ASSERT_EQ(job.err_lines().size(), 3u) << job.err();
  EXPECT_THAT(
      job.err_lines().front(),
      testing::MatchesRegex("--set memory.limit_bytes=100000: \\[memory\\] "
                            "limit_bytes = .*: rank 0 needs .* more than "
                            "the limit of 97.7 KiB; .*"));
  EXPECT_FALSE(fs::exists(run));
}

TEST(Precision, EndlessOverflowsEndTheRun) {
  TempFolder folder;
  const std::string run = folder.path() + "/run";
  Command job(
      train_digits(run, 40) + Words{"-n", "2"} +
      set({"precision.compute=fp16", "precision.initial_loss_scale=1e30"}));
  EXPECT_EQ(job.wait(), 4);
  EXPECT_THAT(
      job.err(), HasAll(
                     "step 20: gradients overflowed in 20 steps in a row",
                     "Set [precision] compute = \"bf16\""));
  const auto metrics = timeline::read_metrics(run + "/metrics.jsonl");
  ASSERT_EQ(metrics.steps.size(), 19u);
  EXPECT_EQ(metrics.steps.back().skipped_steps, 19);
  // Nothing was updated: the loss is that of the first values.
  EXPECT_NEAR(metrics.steps.back().loss, std::log(10.0), 0.1);
}

TEST(Precision, LayersNormsAreInTheMetrics) {
  TempFolder folder;
  const std::string run = folder.path() + "/run";
  Command job(
      train_digits(run, 3) + Words{"-n", "2"} +
      set(
          {"precision.compute=bf16", "train.layer_norms=true",
           "train.log_every=1"}));
  EXPECT_EQ(job.wait(), 0) << job.err();
  const auto metrics = timeline::read_metrics(run + "/metrics.jsonl");
  ASSERT_EQ(metrics.steps.size(), 3u);
  const auto& norms = metrics.steps[2].layer_grad_norms;
  ASSERT_EQ(norms.size(), 3u);
  EXPECT_EQ(norms[0].first, "conv1");
  EXPECT_GT(norms[2].second, 0);
  EXPECT_THAT(
      read_text_file(run + "/report.html"),
      HasSubstr("bf16, master parameters float32"));
}

TEST(Report, PredictsTheStepOnceThisMachineIsMeasured) {
  TempFolder folder;
  const std::string run = folder.path() + "/run";
  const Words processors = {
      "CUDA_VISIBLE_DEVICES=", "XDG_CONFIG_HOME=" + folder.path()};
  const Words command =
      train_digits(run, 12) + Words{"-n", "2", "--set", "train.overwrite=true"};
  Command before(command, processors);
  ASSERT_EQ(before.wait(), 0) << before.err();
  std::string page = read_text_file(run + "/report.html");
  EXPECT_THAT(
      page, HasSubstr("<code>echelon bench --save -n 2</code> measures "));
  EXPECT_EQ(page.find("id=\"prediction\""), std::string::npos);

  ::setenv("XDG_CONFIG_HOME", folder.path().c_str(), 1);
  fs::create_directories(cluster::saved_cluster_path(1).parent_path());
  std::ofstream(cluster::saved_cluster_path(1)) << kMeasuredDesk;
  std::ofstream(cluster::saved_cluster_path(2)) << kMeasuredDesk;
  ::unsetenv("XDG_CONFIG_HOME");
  for (const char* layout : {"dp=2", "pp=2"}) {
    Command after(command + Words{"--layout", layout}, processors);
    ASSERT_EQ(after.wait(), 0) << after.err();
    page = read_text_file(run + "/report.html");
    EXPECT_THAT(
        page,
        HasSubstr("On this machine as measured a step was predicted to "));
    EXPECT_NE(page.find("id=\"prediction\""), std::string::npos);
    EXPECT_NE(page.find(">rank 1</th><td>"), std::string::npos);
  }
  EXPECT_NE(page.find(">waiting for other stages</th><td>"), std::string::npos);
  EXPECT_TRUE(fs::exists(run + "/layers.json"));

  Command devices(
      train_digits(run, 12) + Words{"-n", "1"} +
          set({"train.overwrite=true", "model.devices=[\"cpu\", \"cpu\"]"}),
      processors);
  ASSERT_EQ(devices.wait(), 0) << devices.err();
  EXPECT_THAT(
      read_text_file(run + "/report.html"),
      HasSubstr("Nothing is predicted: [model] devices: "));
}

// The table of the report's prediction: each part with both of its figures.
std::string prediction_row(const std::string& page, const std::string& name) {
  const std::string head = ">" + name + "</th><td>";
  const size_t begin = page.find(head, page.find("id=\"prediction\""));
  if (begin == std::string::npos) return "no row " + name;
  return page.substr(begin, page.find("</tr>", begin) - begin);
}

TEST(Report, PredictsWhatExplainPredicts) {
  TempFolder folder;
  const std::string run = folder.path() + "/run";
  const Words places = {
      "CUDA_VISIBLE_DEVICES=", "XDG_CONFIG_HOME=" + folder.path()};
  ::setenv("XDG_CONFIG_HOME", folder.path().c_str(), 1);
  fs::create_directories(cluster::saved_cluster_path(2).parent_path());
  std::ofstream(cluster::saved_cluster_path(2)) << kMeasuredDesk;
  ::unsetenv("XDG_CONFIG_HOME");
  const Words again = {"--set", "train.overwrite=true"};
  for (const char* layout : {"dp=2", "pp=2", "fsdp=2"}) {
    Command training(
        train_digits(run, 12) + again + Words{"--layout", layout}, places);
    ASSERT_EQ(training.wait(), 0) << training.err();
    const std::string page = read_text_file(run + "/report.html");
    Command explain({kEchelon, "explain", run, "--json"}, places);
    ASSERT_EQ(explain.wait(), 0) << explain.err();
    const auto told = nlohmann::json::parse(explain.out());
    EXPECT_EQ(told.at("layers"), "counted");
    EXPECT_EQ(told.at("cluster"), "this machine as measured");
    EXPECT_THAT(
        page, HasSubstr(
                  "a step was predicted to take " +
                  format_seconds(told.at("predicted_seconds").get<double>())));
    for (const auto& part : told.at("parts")) {
      const std::string row = prediction_row(page, part.at("name"));
      for (const char* figure : {"predicted", "measured"}) {
        const double seconds = part.at(figure).get<double>();
        EXPECT_THAT(
            row, HasSubstr(seconds > 0 ? format_seconds(seconds) : "–"));
      }
    }
  }
  // Layers of an earlier process are not used when this one counted none.
  Command together(
      train_digits(run, 12) + again + Words{"--layout", "tp=2"}, places);
  ASSERT_EQ(together.wait(), 0) << together.err();
  EXPECT_FALSE(fs::exists(run + "/layers.json"));
  EXPECT_THAT(
      read_text_file(run + "/report.html"),
      HasSubstr("Nothing is predicted: tp=2, but what ranks of tp compute"));
}

// A small gpt on the bytes of a file, parallel along all three axes.
class ThreeDimensions : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(
    Ranks, ThreeDimensions, testing::Values("processes", "threads"),
    [](const auto& info) { return info.param; });

TEST_P(ThreeDimensions, VerifiesAndTrains) {
  TempFolder folder;
  const std::string config = folder.path() + "/gpt.toml";
  const std::string run = folder.path() + "/run";
  std::ofstream(config)
      << "[model]\nname = \"gpt\"\nlayers = 2\nhidden_size = 20\nheads = 5\n"
         "max_positions = 16\n[data]\nname = \"text\"\nsources = "
         "[\""
      << source_path("doc/configuration.md")
      << "\"]\nsequence = 16\n"
         "[train]\nsteps = 4\nbatch = 16\nrun = \""
      << run << "\"\n";
  const Words layout =
      Words{config, "--layout", "dp=2,pp=2,tp=2", "-n",
            "8",    "--ranks",  GetParam()} +
      set({"layout.sequence_parallel=true", "layout.microbatches=4"});
  const Words cache = {"ECHELON_CACHE=" + folder.path() + "/cache"};
  Command verify(Words{kEchelon, "verify", "--steps", "2"} + layout, cache);
  EXPECT_EQ(verify.wait(), 0) << verify.out() << verify.err();
  EXPECT_THAT(verify.out(), HasSubstr("equal: "));

  Command train(Words{kEchelon, "train"} + layout, cache);
  EXPECT_EQ(train.wait(), 0) << train.out() << train.err();
  EXPECT_THAT(
      train.out(), HasAll(
                       "tokens/s", "\nperplexity ",
                       "stage 1 (pipeline rank 1): transformer.h."));
  const auto metrics = timeline::read_metrics(run + "/metrics.jsonl");
  ASSERT_EQ(metrics.steps.size(), 4u);
  EXPECT_GT(metrics.steps[0].tokens_per_second.value_or(0), 0);
  const double loss = metrics.evaluations.at(0).loss;
  EXPECT_NEAR(
      metrics.evaluations[0].perplexity.value_or(0), std::exp(loss), 1e-6);
  EXPECT_TRUE(fs::exists(run + "/checkpoints/last.safetensors"));
  EXPECT_THAT(
      read_text_file(run + "/report.html"), HasSubstr("Held-out perplexity"));
}

/// A file system of a few KiB, alone for one command. What is in its folder
/// `run` when the command has ended is copied.
class FullDisk : public testing::Test {
 protected:
  void SetUp() override {
    fs::create_directory(disk_);
    if (Command(on_disk("4k", {"true"})).wait() != 0) {
      GTEST_SKIP() << "this system lets us mount no file system of our own "
                      "(`unshare --mount`, as root)";
    }
    fs::remove_all(kept_);
  }
  Words on_disk(const std::string& size, const Words& words) const {
    return Words{
               "unshare",
               "--mount",
               "sh",
               "-c",
               "mount -t tmpfs -o size=$0 tmpfs " + disk_ +
                   " && { \"$@\"; "
                   "code=$?; [ ! -e " +
                   disk_ + "/run ] || cp -r " + disk_ + "/run " + kept_ +
                   "; exit $code; }",
               size} +
           words;
  }
  /// Trains there until it ends; returns the last line on the terminal.
  std::string fail(
      const std::string& size, int64_t steps, int exit_code, Words more = {},
      int ranks = 2) {
    Command job(on_disk(
        size, train_digits(disk_ + "/run", steps) +
                  Words{"-n", std::to_string(ranks), "--max-restarts", "0"} +
                  more));
    EXPECT_EQ(job.wait(), exit_code) << job.err();
    EXPECT_TRUE(job.living().empty());
    const auto lines = job.err_lines();
    return lines.empty() ? "" : lines.back();
  }
  bool is_kept(const std::string& name) const {
    return fs::exists(fs::path(kept_) / name);
  }

  TempFolder folder_;
  std::string disk_ = folder_.path() + "/disk";
  std::string kept_ = folder_.path() + "/kept";
};

// Training goes on: there may be room when it ends.
TEST_F(FullDisk, WithoutRoomForTheMetricsTrainsToTheEnd) {
  const auto last = fail("56k", 400, 3);
  EXPECT_THAT(
      last, HasAll(
                "the checkpoint of step 400 failed: ",
                "kept in " + disk_ + "/run: metrics.jsonl"));
  const auto metrics =
      timeline::read_metrics(fs::path(kept_) / "metrics.jsonl");
  EXPECT_FALSE(metrics.truncated);
  EXPECT_GT(metrics.steps.size(), 10u);
}

TEST_F(FullDisk, TellsOfTheCheckpointAndOfTheReport) {
  // A rank other than 0 knows only of the checkpoint.
  const auto last = fail("40k", 20, 3, {}, 1);
  EXPECT_THAT(
      last, HasAll(
                "the checkpoint of step 20 failed: ",
                "; cannot write " + disk_ + "/run/timeline.json: ",
                "kept in " + disk_ + "/run: metrics.jsonl"));
}

TEST_F(FullDisk, WithoutRoomForTheWeightsKeepsTheMetrics) {
  const auto last = fail("256k", 10, 3, {"--set", "model.name=mlp"});
  EXPECT_THAT(
      last, HasAll(
                "the checkpoint of step 10 failed: ",
                disk_ + "/run/checkpoints: a checkpoint "
                        "needs ",
                "are free there", "kept in " + disk_ + "/run: metrics.jsonl"));
  EXPECT_EQ(
      timeline::read_metrics(fs::path(kept_) / "metrics.jsonl").steps.size(),
      10u);
  for (const auto& left : fs::directory_iterator(kept_ + "/checkpoints")) {
    EXPECT_EQ(left.path().filename(), "LOCK");
  }
}

TEST_F(FullDisk, WithoutRoomForTheReportKeepsTheWeights) {
  const auto last = fail("200k", 20, 1);
  EXPECT_THAT(
      last, HasAll(
                disk_ + "/run/timeline.json", "No space left on device",
                "kept in " + disk_ +
                    "/run: metrics.jsonl, "
                    "checkpoints/last.safetensors"));
  EXPECT_TRUE(is_kept("checkpoints/last.safetensors"));
  EXPECT_TRUE(is_kept("config.toml"));
  EXPECT_FALSE(is_kept("report.html"));
  Command exported({kEchelon, "export", kept_, folder_.path() + "/out"});
  EXPECT_EQ(exported.wait(), 0) << exported.err();
}

TEST_F(FullDisk, WithoutRoomForTheRunsLockStartsNothing) {
  Command job(on_disk(
      "4k",
      {"sh", "-c",
       "head -c 4096 /dev/zero >" + disk_ + "/full; exec " + kEchelon +
           " train " + kDigits + " -n 2 --set train.run=" + disk_ + "/run"}));
  EXPECT_EQ(job.wait(), 3);
  EXPECT_THAT(
      job.err_lines().back(),
      HasAll(disk_ + "/run/LOCK", "No space left on device"));
}

TEST_F(FullDisk, EndsASimulationWhoseMetricsCannotBeKept) {
  Command job(on_disk(
      "4k", {kEchelon, "simulate", "--model", "gpt2", "--cluster",
             "h100-sxm:1x8", "--layout", "dp=8", "--batch", "8", "--steps",
             "100", "--run", disk_ + "/run"}));
  EXPECT_EQ(job.wait(), 1);
  EXPECT_THAT(
      job.err_lines().back(),
      HasAll("metrics.jsonl", "No space left on device"));
}

// The last steps took less than the 50 ms for which lines are held back.
TEST(TrainMetrics, AreWrittenBeforeAnUncaughtError) {
  const TempFolder folder;
  Command job({test_program("troubled_train"), folder.path(), "throws"});
  EXPECT_EQ(job.wait(), 1);
  EXPECT_THAT(job.err(), HasSubstr("planted"));
  EXPECT_EQ(
      timeline::read_metrics(folder.path() + "/metrics.jsonl").steps.size(),
      5u);
}

// Each host has a configuration and a run folder of its own.
// Starts two ranks on host `number` of two; `layout` is of TOML.
Words two_ranks(
    const TestHosts& hosts, const std::string& folder, int number,
    const std::string& layout, int64_t steps, bool shared = false) {
  const std::string run = folder + "/" + std::to_string(number);
  fs::create_directory(run);
  std::ofstream(run + "/config.toml")
      << "[data]\nname = \"digits\"\n[model]\nclasses = 10\n[layout]\n"
      << layout << "\n[checkpoint]\nat_end = " << (shared ? "true" : "false")
      << "\n[train]\nsteps = " << steps << "\nbatch = 64\nrun = \"" << run
      << "\"\n";
  return hosts.on(
      number, {kEchelon, "run", "-n", "2", "--nnodes", "2", "--node-rank",
               std::to_string(number), "--master-addr", hosts.address(0), "--",
               program("echelon-train"), "train", run + "/config.toml"});
}

TEST(TwoHostsTrain, TensorParallelismOverHostsIsAWarning) {
  const TestHosts hosts;
  if (!hosts.reason().empty()) GTEST_SKIP() << hosts.reason();
  const auto errors_of = [&](const std::string& layout) {
    const TempFolder folder;
    Command a(two_ranks(hosts, folder.path(), 0, layout, 2));
    Command b(two_ranks(hosts, folder.path(), 1, layout, 2));
    EXPECT_EQ(a.wait(), 0) << a.err();
    EXPECT_EQ(b.wait(), 0) << b.err();
    return a.err() + b.err();
  };
  EXPECT_THAT(
      errors_of("tp = 4"),
      HasSubstr("warning: [layout] tp=4: a host has 2 ranks, so that some "
                "groups of 4 span several hosts"));
  EXPECT_THAT(errors_of("dp = 2\ntp = 2"), testing::Not(HasSubstr("warning")));
}

// The same command on both hosts, with the number of the host: the second time
// it resumes.
TEST(TwoHostsTrain, StartsAndResumesByOneCommandOnEachHost) {
  const TestHosts hosts;
  if (!hosts.reason().empty()) GTEST_SKIP() << hosts.reason();
  const TempFolder folder;
  const std::string run = folder.path() + "/run";
  for (const int64_t steps : {4, 7}) {
    const auto start = [&](int number) {
      return hosts.on(
          number,
          train_digits(run, steps) + Words{
                                         "-n", "2", "--nnodes", "2",
                                         "--node-rank", std::to_string(number),
                                         "--master-addr", hosts.address(0)});
    };
    Command second(start(1));
    Command first(start(0));
    EXPECT_EQ(first.wait(), 0) << first.err();
    EXPECT_EQ(second.wait(), 0) << second.err();
    if (steps == 7) {
      EXPECT_THAT(first.out(), HasSubstr("saved with dp=4 on 4 ranks"));
    }
  }
  EXPECT_EQ(timeline::read_metrics(run + "/metrics.jsonl").steps.size(), 7u);
  EXPECT_TRUE(fs::exists(run + "/log/rank-3.log"));
}

// A trainer that another launcher starts makes the folder that [train] run
// names, wherever its configuration is.
TEST(TrainProgram, TrainsIntoTheFolderThatItsConfigurationNames) {
  const TempFolder folder;
  fs::create_directory(folder.path() + "/configs");
  const std::string config = folder.path() + "/configs/mine.toml";
  const std::string run = folder.path() + "/runs/mine";
  std::ofstream(config)
      << "[data]\nname = \"digits\"\n[model]\nclasses = 10\n[layout]\ndp = 2\n"
         "[train]\nsteps = 3\nbatch = 64\nrun = \""
      << run << "\"\n";
  const Words words = {kEchelon, "run", "-n",
                       "2",      "--",  program("echelon-train"),
                       "train",  config};
  Command job(words);
  ASSERT_EQ(job.wait(), 0) << job.err();
  EXPECT_TRUE(fs::exists(run + "/config.toml"));
  EXPECT_TRUE(fs::exists(run + "/report.html"));
  const fs::directory_iterator beside(folder.path() + "/configs");
  EXPECT_EQ(std::distance(begin(beside), end(beside)), 1);
}

TEST(TwoHostsTrain, CheckpointsNeedASharedFolder) {
  const TestHosts hosts;
  if (!hosts.reason().empty()) GTEST_SKIP() << hosts.reason();
  const TempFolder folder;
  Command a(two_ranks(hosts, folder.path(), 0, "dp = 4", 2, true));
  Command b(two_ranks(hosts, folder.path(), 1, "dp = 4", 2, true));
  EXPECT_EQ(a.wait(), 2);
  EXPECT_EQ(b.wait(), 2);
  EXPECT_THAT(
      a.err(), HasAll(
                   "rank 2 does not see in its " + folder.path() + "/1/",
                   "checkpoints need a folder that all hosts share"));
}

TEST(TwoHostsTrain, WithoutASharedFolderAllRanksAreInTheReport) {
  const TestHosts hosts;
  if (!hosts.reason().empty()) GTEST_SKIP() << hosts.reason();
  const TempFolder folder;
  Command a(two_ranks(hosts, folder.path(), 0, "dp = 4", 12));
  Command b(two_ranks(hosts, folder.path(), 1, "dp = 4", 12));
  EXPECT_EQ(a.wait(), 0) << a.err();
  EXPECT_EQ(b.wait(), 0) << b.err();
  const timeline::Timeline timeline =
      timeline::read_chrome_trace(folder.path() + "/0/timeline.json");
  EXPECT_EQ(timeline.rank_names.size(), 4u);
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_TRUE(std::ranges::any_of(
        timeline.spans,
        [&](const timeline::Span& span) {
          return span.rank == rank && span.name == "backward";
        }))
        << "rank " << rank;
  }
}

}  // namespace echelon::command_test
