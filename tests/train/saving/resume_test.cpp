// Training that is resumed, in one process with threads as ranks.
#include "echelon/train/saving/resume.h"

#include <gmock/gmock.h>

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>

#include "echelon/checkpoint/files/checked_file.h"
#include "echelon/checkpoint/files/reader.h"
#include "echelon/checkpoint/memory/memory_slots.h"
#include "echelon/checkpoint/tensors/tensor_file.h"
#include "echelon/models/build.h"
#include "echelon/text/text_file.h"
#include "echelon/text/units.h"
#include "echelon/timeline/metrics.h"
#include "echelon/train/trainer.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"
#include "tests/train/small_run.h"
#include "tests/train/trained_runs.h"

namespace echelon::resume_test {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class Resumed : public TrainedRuns {
 protected:
  // With momentum, epochs of 30 steps, random crops and flips, and a schedule.
  static Job digits(const std::string& layout, int64_t steps) {
    Job job;
    job.data.name = DataKind::digits;
    job.layout = parse_layout(layout);
    job.optimizer.schedule = RateSchedule::cosine;
    job.optimizer.clip_norm = 1;
    job.train.steps = steps;
    job.train.batch = 48;
    job.train.log_every = 1000;
    job.checkpoint.keep = 100;
    return job;
  }

  fs::path path(const std::string& name) const { return folder_.path(name); }

  timeline::MetricsFile metrics(const std::string& name) const {
    return timeline::read_metrics(path(name) / "metrics.jsonl");
  }

  // The state of a run after a crash between step `step` and the next
  // checkpoint.
  void
  leave_only(const std::string& from, int64_t step, const std::string& to) {
    fs::create_directories(path(to));
    fs::copy(path(from), path(to), fs::copy_options::recursive);
    for (const auto& place : list_checkpoints(path(to) / "checkpoints")) {
      if (place.step > step) fs::remove_all(place.path);
    }
    fs::remove(path(to) / "checkpoints/last.safetensors");
  }

  // Everything but its times is compared.
  static auto computed(const timeline::StepMetrics& step) {
    return std::tie(
        step.step, step.loss, step.epoch, step.learning_rate, step.grad_norm,
        step.loss_scale, step.skipped_steps);
  }

  void expect_same_run(const std::string& actual, const std::string& expected) {
    const auto a = metrics(actual);
    const auto b = metrics(expected);
    ASSERT_EQ(a.steps.size(), b.steps.size());
    for (size_t i = 0; i < a.steps.size(); ++i) {
      EXPECT_EQ(computed(a.steps[i]), computed(b.steps[i])) << "step " << i + 1;
    }
    ASSERT_EQ(a.evaluations.size(), b.evaluations.size());
    for (size_t i = 0; i < a.evaluations.size(); ++i) {
      EXPECT_EQ(a.evaluations[i].step, b.evaluations[i].step);
      EXPECT_EQ(a.evaluations[i].loss, b.evaluations[i].loss);
      EXPECT_EQ(a.evaluations[i].accuracy, b.evaluations[i].accuracy);
    }
    const auto tensors = load_tensors(last_weights(path(actual)));
    const auto others = load_tensors(last_weights(path(expected)));
    ASSERT_EQ(tensors.size(), others.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      EXPECT_EQ(tensors[i].first, others[i].first);
      EXPECT_TRUE(tensors[i].second.equal(others[i].second))
          << tensors[i].first;
    }
  }

  // Newest first.
  std::vector<int64_t> saved_steps(const std::string& name) const {
    std::vector<int64_t> steps;
    for (const auto& place : list_checkpoints(path(name) / "checkpoints")) {
      steps.push_back(place.step);
    }
    return steps;
  }
};

class SameLayout : public Resumed,
                   public testing::WithParamInterface<std::string> {
 protected:
  // Losses, learning rates, norms, evaluations and weights agree to the last
  // bit.
  void check(
      Job job, int64_t every, const std::vector<int64_t>& from,
      const LayerList* layers = nullptr) {
    job.layout = parse_layout(GetParam());
    job.checkpoint.every_steps = every;
    job.checkpoint.keep = 100;
    run(job, "whole", layers);
    for (const int64_t step : from) {
      SCOPED_TRACE(step);
      const std::string name = "from" + std::to_string(step);
      leave_only("whole", step, name);
      run(job, name, layers);
      expect_same_run(name, "whole");
    }
  }
};

TEST_P(SameLayout, ResumesAsIfItHadNeverStopped) {
  check(digits(GetParam(), 40), 7, {7, 28, 35});  // an epoch ends at 30
  EXPECT_EQ(saved_steps("whole").size(), 6u);
}

// The scale is found within these steps: it halves, and doubles again.
TEST_P(SameLayout, ResumesItsLossScale) {
  constexpr int64_t kSteps = 14;
  Job job = digits(GetParam(), kSteps);
  job.precision.compute = ComputeDtype::fp16;
  job.precision.initial_loss_scale = 1ll << 30;
  job.precision.loss_scale_growth = 3;
  check(job, 2, {2, 8});
  const auto steps = metrics("whole").steps;
  ASSERT_TRUE(steps[1].skipped_steps && steps.back().loss_scale);
  EXPECT_GT(*steps[1].skipped_steps, 0);
  EXPECT_GT(*steps.back().skipped_steps, *steps[1].skipped_steps);
  EXPECT_LT(*steps.back().loss_scale, *steps[1].loss_scale);
  EXPECT_LT(*steps.back().skipped_steps, kSteps);
}

TEST_P(SameLayout, ATextModelResumesItsDropout) {
  Job job = small_gpt(write_tokens(folder_));
  job.model.dtype = ModelDtype::float32;
  job.model.dropout = 0.2;
  job.train.log_every = 1000;
  check(job, 3, {3, 6});
}

// Each rank has statistics of its own samples, unless it shares them.
TEST_P(SameLayout, AModelResumesItsStatistics) {
  Job job;
  job.model.name = "resnet18";
  job.data.name = DataKind::dummy;
  job.data.samples = 40;
  job.data.shape = {3, 8, 8};
  job.train.batch = 8;
  job.train.steps = 5;
  job.train.log_every = 1000;
  job.pipeline.microbatches = 1;
  job.optimizer = {
      .name = OptimizerKind::sgd, .learning_rate = 0.01, .momentum = 0.9};
  // The first of its blocks: the whole has eleven million parameters.
  const LayerList layers =
      models::resnet_layers({.blocks = {1, 1}}, 3, job.data.classes, {});
  check(job, 2, {2, 4}, &layers);
}

// What a launcher gives its ranks, for as long as it lives.
class Memory : public MemorySlots {
 public:
  explicit Memory(int num_ranks) : MemorySlots(num_ranks) {
    ::setenv("ECHELON_MEMORY", path().c_str(), 1);
  }
  ~Memory() { ::unsetenv("ECHELON_MEMORY"); }

  // Changes the last byte of each file of the newest `count` checkpoints.
  void damage(size_t count) {
    for (const auto& place : checkpoints_in_memory(path())) {
      if (count-- == 0) return;
      const auto manifest = read_manifest(place.path.string());
      for (const auto& file : manifest.files) {
        std::fstream bytes(place.path.parent_path() / file.name);
        bytes.seekg(-1, std::ios::end);
        const int last = bytes.peek();
        bytes.seekp(-1, std::ios::end);
        bytes.put(static_cast<char>(last ^ 1));
      }
    }
  }
};

TEST_P(SameLayout, ResumesFromMemory) {
  Job job = digits(GetParam(), 40);
  run(job, "whole");
  const auto ranks = job.layout.num_ranks();
  Memory memory(static_cast<int>(ranks));
  job.elastic.memory_steps = 33;
  job.checkpoint.at_end = false;
  run(job, "again");
  EXPECT_EQ(memory.collect(), 33);
  job.checkpoint.at_end = true;
  run(job, "again");
  expect_same_run("again", "whole");
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, SameLayout,
    testing::Values("dp=1", "dp=2", "fsdp=2", "dp=2,fsdp=2", "pp=2"),
    [](const auto& info) {
      std::string name = info.param;
      for (char& c : name) {
        if (c == '=' || c == ',') c = '_';
      }
      return name;
    });

TEST_F(Resumed, AnotherLayoutResumesFromMemory) {
  const auto small = [&](const char* layout) {
    Job job = small_gpt(write_tokens(folder_));
    job.layout = parse_layout(layout);
    job.train.batch = 12;
    job.train.log_every = 1000;
    return job;
  };
  run(small("dp=1"), "whole");
  for (const auto& [before, after] :
       {std::pair("tp=2", "fsdp=2"), std::pair("fsdp=3", "pp=2"),
        std::pair("pp=2", "dp=1"), std::pair("dp=2,tp=2", "dp=3")}) {
    SCOPED_TRACE(std::string(before) + " to " + after);
    const std::string name = after;
    Memory memory(4);
    Job job = small(before);
    job.elastic.memory_steps = 5;
    job.checkpoint.at_end = false;
    run(job, name);
    EXPECT_EQ(memory.collect(), 5);
    run(small(after), name);
    echelon::expect_same_run(path(name), path("whole"));
  }
}

// A rank was killed before the last checkpoint was on disk.
TEST_F(Resumed, ALastStepInMemoryIsSaved) {
  Job job = digits("dp=2", 40);
  run(job, "whole");
  job.elastic.memory_steps = 10;
  job.checkpoint.at_end = false;
  Memory memory(2);
  run(job, "again");
  EXPECT_EQ(memory.collect(), 40);
  job.checkpoint.at_end = true;
  run(job, "again");
  EXPECT_THAT(saved_steps("again"), ElementsAre(40));
  expect_same_run("again", "whole");
}

TEST_F(Resumed, ADamagedCopyInMemoryIsLeftOut) {
  Job job = digits("dp=2", 40);
  run(job, "whole");
  job.elastic.memory_steps = 10;
  const auto train_to_the_end = [&](const std::string& name, size_t damaged) {
    Memory memory(2);
    Job first = job;
    first.checkpoint.at_end = false;
    run(first, name);
    EXPECT_EQ(memory.collect(), 40);
    memory.damage(damaged);
    const std::string error = error_text<Error>([&] { run(job, name); });
    return error + (memory.collect() ? "" : " and none is left");
  };
  EXPECT_EQ(train_to_the_end("one", 1), "no error");
  expect_same_run("one", "whole");
  EXPECT_THAT(
      train_to_the_end("both", 2),
      AllOf(
          HasSubstr("no copy of the state in memory is intact; the next start "
                    "goes on without: /proc/"),
          HasSubstr(" and none is left")));
  run(job, "both");
  expect_same_run("both", "whole");
}

// Nothing is left to do: no step, no evaluation, no second checkpoint.
TEST_F(Resumed, AFinishedRunFinishesAgain) {
  for (const std::string layout : {"dp=1", "dp=2"}) {
    SCOPED_TRACE(layout);
    const Job job = digits(layout, 4);
    run(job, layout);
    const std::string weights = last_weights(path(layout));
    const auto before = metrics(layout);
    const auto tensors = load_tensors(weights);
    fs::remove(weights);
    run(job, layout);
    EXPECT_EQ(metrics(layout).steps, before.steps);
    EXPECT_EQ(metrics(layout).evaluations, before.evaluations);
    EXPECT_EQ(saved_steps(layout).size(), 1u);
    const auto again = load_tensors(weights);
    ASSERT_EQ(again.size(), tensors.size());
    EXPECT_TRUE(again[0].second.equal(tensors[0].second));
  }
}

TEST_F(Resumed, AFinishedRunKeepsItsTimelineAndReport) {
  const Job job = digits("dp=2", 4);
  run(job, "run");
  const std::string report = read_text_file(path("run") / "report.html");
  const std::string timeline = read_text_file(path("run") / "timeline.json");
  run(job, "run");
  EXPECT_TRUE(read_text_file(path("run") / "report.html") == report);
  EXPECT_TRUE(read_text_file(path("run") / "timeline.json") == timeline);
}

TEST_F(Resumed, TheReportCountsTheTimeOfEarlierProcesses) {
  Job job = digits("dp=1", 4);
  run(job, "run");
  timeline::MetricsFile before = metrics("run");
  fs::remove(path("run") / "metrics.jsonl");
  timeline::MetricsWriter writer(path("run") / "metrics.jsonl");
  for (auto& step : before.steps) {
    step.step_seconds = 50 * 3600;
    writer.append(step);
  }
  writer.flush();
  job.train.steps = 6;
  run(job, "run");
  const auto tile = [&](const char* name) {
    const std::string report = read_text_file(path(name) / "report.html");
    return report.substr(report.find("Training time"), 120);
  };
  EXPECT_THAT(
      tile("run"), testing::AllOf(HasSubstr("200"), HasSubstr("6 steps")));
  // It is the sum of what metrics.jsonl has of the steps.
  job.train.steps = 4;
  run(job, "once");
  double seconds = 0;
  for (const auto& step : metrics("once").steps) seconds += step.step_seconds;
  const std::string text = format_seconds(seconds);
  EXPECT_THAT(tile("once"), HasSubstr(text.substr(0, text.find(' '))));
}

TEST_F(Resumed, OwnCheckpointsComeBeforeThoseItBeganFrom) {
  Job job = digits("dp=1", 4);
  run(job, "first");
  job.train.steps = 6;
  job.checkpoint.resume = path("first").string();
  run(job, "second");
  job.train.steps = 8;
  testing::internal::CaptureStdout();
  run(job, "second");
  EXPECT_THAT(
      testing::internal::GetCapturedStdout(),
      HasAll(
          "resumes from step 6 of " + path("second").string(),
          "of its own, and no longer needs " + path("first").string()));
  const auto steps = metrics("second").steps;
  ASSERT_EQ(steps.size(), 4u);
  EXPECT_EQ(steps.front().step, 5);
  EXPECT_EQ(steps.back().step, 8);
}

// A checkpoint may be anyone's.
TEST_F(Resumed, WhatACheckpointSaysIsShownAsText) {
  Job job = digits("dp=1", 2);
  run(job, "first");
  const auto checkpoint = list_checkpoints(path("first") / "checkpoints");
  const auto file = checkpoint.front().path / "manifest.json";
  auto manifest = parse_manifest(read_file(file.string()), file.string());
  manifest.layout = "dp=1\x1b[2J";
  std::ofstream(file) << to_json(manifest);
  job.train.steps = 3;
  job.checkpoint.resume = path("first").string();
  testing::internal::CaptureStdout();
  run(job, "second");
  EXPECT_THAT(
      testing::internal::GetCapturedStdout(),
      AllOf(HasSubstr("dp=1?[2J"), testing::Not(HasSubstr("\x1b[2J"))));
}

TEST_F(Resumed, ADoneRunSaysSo) {
  const Job job = digits("dp=1", 4);
  run(job, "run");
  testing::internal::CaptureStdout();
  run(job, "run");
  EXPECT_THAT(
      testing::internal::GetCapturedStdout(),
      HasSubstr("the run has all its 4 steps; raise train.steps or "
                "train.epochs"));
  EXPECT_EQ(metrics("run").steps.size(), 4u);
}

TEST_F(Resumed, CheckpointsByTime) {
  Job job = digits("dp=2", 4);
  job.checkpoint.at_end = false;
  job.checkpoint.every_minutes = 1e-9;  // has passed at each step
  run(job, "often");
  EXPECT_THAT(saved_steps("often"), ElementsAre(4, 3, 2, 1));
  job.checkpoint.every_minutes = 1e6;
  run(job, "seldom");
  EXPECT_THAT(saved_steps("seldom"), IsEmpty());
}

TEST_F(Resumed, NoLastCheckpointWhenNoneIsWanted) {
  Job job = digits("dp=2", 5);
  job.checkpoint.at_end = false;
  run(job, "none");
  EXPECT_FALSE(fs::exists(path("none") / "checkpoints"));
  job.checkpoint.every_steps = 2;
  run(job, "some");
  EXPECT_THAT(saved_steps("some"), ElementsAre(4, 2));
  EXPECT_FALSE(fs::exists(path("some") / "checkpoints/last.safetensors"));
}

// Ranks have other numbers in the same groups.
TEST_F(Resumed, InAnotherOrderOfTheAxesToTheLastBit) {
  for (const char* layout :
       {"dp=2,tp=2", "fsdp=2,tp=2", "dp=2,pp=2", "pp=2,tp=2", "dp=2,fsdp=2"}) {
    SCOPED_TRACE(layout);
    const std::string name = layout;
    Job job = digits(layout, 12);
    job.checkpoint.every_steps = 5;
    run(job, name);
    leave_only(name, 5, name + " again");
    auto& order = job.layout.order;
    std::reverse(order.begin(), order.end());
    run(job, name + " again");
    expect_same_run(name + " again", name);
  }
}

TEST_F(Resumed, FromAnotherRunsFolder) {
  Job job = digits("dp=2", 20);
  job.checkpoint.every_steps = 10;
  run(job, "first");
  job.layout = parse_layout("fsdp=2");
  job.train.steps = 30;
  job.optimizer.schedule = RateSchedule::constant;
  job.checkpoint.resume = path("first").string();
  run(job, "second");
  const auto steps = metrics("second").steps;
  ASSERT_EQ(steps.size(), 10u);
  EXPECT_EQ(steps.front().step, 21);
}

TEST_F(Resumed, NeverStartsFromStepZero) {
  Job job = digits("dp=1", 3);
  run(job, "run");
  fs::remove(path("run") / "metrics.jsonl");
  job.checkpoint.resume = "never";
  job.train.steps = 2;
  run(job, "run");
  EXPECT_EQ(metrics("run").steps.front().step, 1);
}

void flip(const fs::path& file, int64_t offset) {
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekg(offset);
  const char byte = static_cast<char>(stream.get() ^ 1);
  stream.seekp(offset);
  stream.put(byte);
}

TEST_F(Resumed, ADamagedCheckpointIsSkippedForTheOneBefore) {
  Job job = digits("fsdp=2", 12);
  job.checkpoint.every_steps = 4;
  run(job, "whole");
  leave_only("whole", 8, "damaged");
  const auto newest = list_checkpoints(path("damaged") / "checkpoints").front();
  ASSERT_EQ(newest.step, 8);
  const fs::path file = newest.path / "rank-00001.safetensors";
  flip(file, static_cast<int64_t>(fs::file_size(file)) - 5);
  testing::internal::CaptureStderr();
  run(job, "damaged");
  const std::string warnings = testing::internal::GetCapturedStderr();
  EXPECT_THAT(
      warnings,
      HasAll(
          "step-00000008 is damaged and left out: ", "rank-00001.safetensors"));
  EXPECT_THAT(warnings, testing::Not(HasSubstr("failed")));
  expect_same_run("damaged", "whole");
  for (const auto& place : list_checkpoints(path("damaged") / "checkpoints")) {
    EXPECT_THAT(verify_checkpoint(place.path.string()), IsEmpty());
  }
  EXPECT_THAT(saved_steps("damaged"), ElementsAre(12, 8, 4));
  EXPECT_TRUE(
      fs::exists(path("damaged") / "checkpoints/damaged-step-00000008"));
}

// Its steps can be saved again, as often as the same command is queued.
TEST_F(Resumed, ACheckpointWithoutAManifestIsSetAside) {
  Job job = digits("fsdp=2", 12);
  job.checkpoint.every_steps = 4;
  run(job, "whole");
  leave_only("whole", 8, "damaged");
  const fs::path checkpoints = path("damaged") / "checkpoints";
  fs::remove(checkpoints / "step-00000008/manifest.json");
  testing::internal::CaptureStderr();
  run(job, "damaged");
  EXPECT_THAT(
      testing::internal::GetCapturedStderr(),
      HasSubstr("step-00000008 has no manifest.json and is now damaged-step-"));
  expect_same_run("damaged", "whole");
  EXPECT_THAT(saved_steps("damaged"), ElementsAre(12, 8, 4));
  EXPECT_TRUE(fs::exists(checkpoints / "damaged-step-00000008"));
}

TEST_F(Resumed, ADamagedLineOfMetricsIsLeftOut) {
  Job job = digits("dp=1", 4);
  run(job, "run");
  const fs::path file = path("run") / "metrics.jsonl";
  std::string text = read_text_file(file);
  text[text.find("\"step\":2")] = '\x01';
  std::ofstream(file) << text;
  job.train.steps = 6;
  testing::internal::CaptureStderr();
  run(job, "run");
  EXPECT_THAT(
      testing::internal::GetCapturedStderr(),
      HasSubstr("warning: " + file.string() + ":2: no line of metrics"));
  std::vector<int64_t> steps;
  for (const auto& step : metrics("run").steps) steps.push_back(step.step);
  EXPECT_THAT(steps, ElementsAre(1, 3, 4, 5, 6));
  EXPECT_EQ(read_text_file(path("run") / "damaged-metrics.jsonl"), text);
}

TEST_F(Resumed, NoIntactCheckpointIsAnError) {
  Job job = digits("dp=1", 2);
  run(job, "run");
  const auto only = list_checkpoints(path("run") / "checkpoints").front();
  flip(only.path / "rank-00000.safetensors", 3000);
  job.train.steps = 4;
  testing::internal::CaptureStderr();
  EXPECT_THAT(
      error_text([&] { run(job, "run"); }),
      HasSubstr("no checkpoint is intact, of 1; the last one: "));
  testing::internal::GetCapturedStderr();
}

TEST_F(Resumed, AnotherSeedOrOtherDataAreRefusedUnlessForced) {
  Job job = digits("dp=1", 2);
  run(job, "run");
  job.train.steps = 3;
  Job other = job;
  other.train.seed = 7;
  EXPECT_THAT(
      error_text([&] { run(other, "run"); }),
      HasSubstr("[train] seed: was 0, now 7: the samples"));
  other = job;
  other.data.holdout = 0.5;
  EXPECT_THAT(
      error_text([&] { run(other, "run"); }),
      HasAll(
          "[data] holdout: was 0.2, now 0.5; [data] samples: was ",
          "; [data] held_out: was "));
  other.checkpoint.force = true;
  run(other, "run");
  EXPECT_EQ(metrics("run").steps.back().step, 3);
}

TEST_F(Resumed, AFileWithOtherContentsIsRefused) {
  Job job = digits("dp=1", 2);
  job.data.name = DataKind::tensors;
  job.data.path = folder_.path("data.safetensors");
  const auto write = [&](double first) {
    auto inputs = torch::ones({64, 1, 8, 8});
    inputs[0] = first;
    save_tensors(
        job.data.path,
        {{"inputs", inputs}, {"targets", torch::arange(64) % 10}});
  };
  write(1);
  run(job, "run");
  job.train.steps = 3;
  write(2);
  EXPECT_THAT(
      error_text([&] { run(job, "run"); }),
      testing::ContainsRegex(
          "contents of " + job.data.path +
          ": was [0-9a-f]{32}, now [0-9a-f]{32}: the samples would not be"));
  write(1);
  run(job, "run");
  EXPECT_EQ(metrics("run").steps.back().step, 3);
}

TEST_F(Resumed, AnotherModelIsRefusedWithAllThatDiffers) {
  Job job = digits("dp=1", 2);
  job.model.name = "mlp";
  job.model.hidden = {16, 16};
  run(job, "run");
  job.train.steps = 3;
  job.model.hidden = {16, 8, 8};
  EXPECT_THAT(
      error_text([&] { run(job, "run"); }),
      testing::AllOf(
          HasSubstr(
              "is of another model or optimizer; resume with its settings, or "
              "name another folder (--set train.run=…) for a run with these:\n"
              "  [model] hidden = [16, 8, 8], the checkpoint has [16, 16]"),
          testing::Not(HasSubstr("missing"))));
}

// A program's layers have no settings.
TEST_F(Resumed, OtherLayersOfAProgramAreNamed) {
  Job job = digits("dp=1", 2);
  const auto layers = [](const std::string& name) {
    LayerList list;
    list.add_function(
        "flat", [](const torch::Tensor& x) { return x.flatten(1); });
    for (int i = 0; i < 8; ++i) {
      list.add(
          name + std::to_string(i), [] { return torch::nn::Linear(64, 64); });
    }
    list.add("out", [] { return torch::nn::Linear(64, 10); });
    return list;
  };
  const LayerList before = layers("a");
  const LayerList now = layers("b");
  run(job, "run", &before);
  job.train.steps = 3;
  EXPECT_THAT(
      error_text([&] { run(job, "run", &now); }),
      HasAll("b0.bias: missing", " more"));
}

TEST_F(Resumed, ChangesSayWhatWasAndWhatIs) {
  Job job = digits("dp=1", 2);
  CheckpointManifest manifest;
  manifest.layout = "dp=2";
  manifest.ranks = 2;
  manifest.total_steps = 600;
  manifest.config = to_toml(job);
  job.train.batch = 16;
  job.optimizer.learning_rate = 0.5;
  EXPECT_THAT(
      differences(manifest, job, "", 120),
      ElementsAre(
          "layout: was dp=2, now dp=1", "ranks: was 2, now 1",
          "steps of the learning rate's schedule: was 600, now 120",
          "[optimizer] learning_rate: was 0.001, now 0.5",
          "[train] batch: was 48, now 16"));
}

TEST_F(Resumed, TwoRunsDoNotShareAFolder) {
  const Job job = digits("dp=1", 2);
  const CheckpointLock lock(path("run") / "checkpoints");
  EXPECT_THAT(
      error_text([&] { run(job, "run"); }),
      HasSubstr("process " + std::to_string(::getpid())));
}

// Steps of less than a millisecond: their metrics are written together, but not
// later than the checkpoint that a killed run resumes from.
TEST_F(Resumed, MetricsAreWrittenBeforeTheirCheckpoint) {
  for (const bool async : {false, true}) {
    Job job = digits("dp=1", 60);
    job.train.batch = 2;
    job.train.eval_every = 1000;
    job.checkpoint.every_steps = 5;
    job.checkpoint.async = async;
    const std::string name = async ? "async" : "sync";
    std::vector<std::pair<int64_t, int64_t>> seen;  // before each pass
    LayerList layers;
    layers.add_function("look", [&](torch::Tensor input) {
      const auto saved = list_checkpoints(path(name) / "checkpoints");
      if (!saved.empty()) {
        seen.emplace_back(saved.front().step, metrics(name).steps.back().step);
      }
      return input.flatten(1);
    });
    layers.add("fc", [] { return torch::nn::Linear(64, 10); });
    run(job, name, &layers);
    ASSERT_GT(seen.size(), 10u);
    for (const auto& [saved, written] : seen) EXPECT_GE(written, saved) << name;
  }
}

TEST_F(Resumed, TheBestOneStays) {
  Job job = digits("dp=1", 30);
  job.checkpoint.every_steps = 5;
  job.checkpoint.keep = 2;
  job.checkpoint.best = BestMetric::eval_loss;
  job.train.eval_every = 5;
  job.optimizer.learning_rate = 3e-3;
  run(job, "run");
  const auto evaluations = metrics("run").evaluations;
  const auto best = std::ranges::min_element(
      evaluations, {}, &timeline::EvaluationMetrics::loss);
  const auto left = saved_steps("run");
  EXPECT_EQ(
      std::set<int64_t>(left.begin(), left.end()),
      (std::set<int64_t>{25, 30, best->step}));
}

TEST_F(Resumed, FilesHoldTheStateOfTheirStep) {
  for (const std::string layout : {"dp=1", "dp=2", "fsdp=2", "pp=2", "tp=3"}) {
    SCOPED_TRACE(layout);
    Job job = digits(layout, 6);
    job.checkpoint.every_steps = 2;
    run(job, "async " + layout);
    job.checkpoint.async = false;
    run(job, "sync " + layout);
    for (const int64_t step : {2, 4, 6}) {
      const CheckpointReader a(
          checkpoint_path(path("async " + layout) / "checkpoints", step));
      const CheckpointReader b(
          checkpoint_path(path("sync " + layout) / "checkpoints", step));
      EXPECT_EQ(a.manifest().content_hash, b.manifest().content_hash) << step;
      EXPECT_EQ(a.manifest().step, step);
    }
  }
}

}  // namespace echelon::resume_test
