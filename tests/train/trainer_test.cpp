#include "echelon/train/trainer.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <thread>
#include <tuple>

#include "echelon/checkpoint/files/folder.h"
#include "echelon/checkpoint/memory/memory_slots.h"
#include "echelon/explain/explain.h"
#include "echelon/job/check_job.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"
#include "echelon/text/units.h"
#include "echelon/timeline/chrome_trace.h"
#include "echelon/timeline/metrics.h"
#include "echelon/train/stop_signals.h"
#include "tests/support/error_text.h"
#include "tests/train/trained_runs.h"

namespace echelon::trainer_test {

using testing::ElementsAre;
using testing::HasSubstr;

class Trainer : public TrainedRuns {
 protected:
  static Job digits(int64_t ranks, int64_t steps) {
    Job job;
    job.data.name = DataKind::digits;
    job.layout.dp_replicate = ranks;
    job.optimizer.learning_rate = 3e-3;
    job.model.dtype = ModelDtype::float64;
    job.train.steps = steps;
    job.train.batch = 48;
    job.train.log_every = 1000;
    return job;
  }

  // Expects the losses of `expected`, with a relative tolerance.
  static void expect_losses(
      const std::vector<timeline::StepMetrics>& actual,
      const std::vector<timeline::StepMetrics>& expected,
      const std::string& name) {
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(actual[i].loss, expected[i].loss, 1e-9 * expected[i].loss)
          << name << ", step " << i + 1;
    }
  }
};

TEST_F(Trainer, FollowsTheSameCurveOnAnyNumberOfRanks) {
  const auto one = steps(digits(1, 60), "one");
  ASSERT_EQ(one.size(), 60u);
  EXPECT_LT(one.back().loss, one.front().loss / 2);
  for (int ranks : {2, 3, 4}) {
    Job job = digits(ranks, 60);
    job.train.accumulate = ranks == 2 ? 3 : 1;
    const std::string name = std::to_string(ranks);
    expect_losses(steps(job, name), one, name + " ranks");
  }
}

TEST_F(Trainer, RanksMayHaveDifferentBatches) {
  const auto one = steps(digits(1, 20), "one");
  Job job = digits(3, 20);
  job.train.rank_batch = {30, 5, 13};
  expect_losses(steps(job, "uneven"), one, "uneven");
}

// Rank 1 takes three times as long for a sample, later rank 0.
TrainDoors slow_ranks(int64_t change_at) {
  return {.work_seconds = [=](int rank, int64_t step, int64_t samples) {
    const bool slow = rank % 2 == (step <= change_at ? 1 : 0);
    return 1e-3 * static_cast<double>(slow ? 3 * samples : samples);
  }};
}

// Whichever rank has a sample, training computes the same.
TEST_F(Trainer, TheBatchFollowsTheSpeedOfRanks) {
  const auto job = [](const Layout& layout) {
    Job job = digits(1, 24);
    job.layout = layout;
    return job;
  };
  const auto one = steps(job({}), "one");
  const auto expect_divided = [&](Job job, const std::string& name,
                                  int64_t most) {
    job.train.rebalance_every = 4;
    const auto file = timeline::read_metrics(
        run(job, name, LayerFactory(), slow_ranks(12)) / "metrics.jsonl");
    expect_losses(file.steps, one, name);
    ASSERT_EQ(file.rebalances.size(), 2u) << name;
    const auto& first = file.rebalances[0];
    EXPECT_EQ(first.step, 6) << name;
    EXPECT_EQ(first.after.front(), most) << name;
    EXPECT_EQ(file.rebalances[1].before, first.after) << name;
    EXPECT_EQ(file.rebalances[1].after.back(), most) << name;
  };
  expect_divided(job({.dp_replicate = 2}), "dp=2", 36);
  expect_divided(job({.dp_shard = 2}), "fsdp=2", 36);
  Job stage = job({.dp_replicate = 2, .dp_shard = 2});
  stage.shard.stage = 1;
  expect_divided(stage, "dp=2,fsdp=2, stage 1", 18);
  Job passes = job({.dp_shard = 2});
  passes.shard.stage = 2;
  passes.train.accumulate = 3;
  expect_divided(passes, "stage 2, 3 passes", 36);
}

// Pipelines have the slow ranks in one of their places, or one is slow.
TEST_F(Trainer, PipelinesFollowTheSpeedOfRanks) {
  Job job = digits(1, 16);
  const auto one = steps(job, "one");
  job.layout = {.dp_replicate = 2, .pp = 2};
  job.pipeline.microbatches = 4;
  job.train.rank_batch = {32, 16};
  job.train.rebalance_every = 4;
  const TrainDoors doors{
      .work_seconds = [](int rank, int64_t, int64_t samples) {
        return static_cast<double>(rank == 1 ? 2 * samples : samples);
      }};
  const auto file = timeline::read_metrics(
      run(job, "two", LayerFactory(), doors) / "metrics.jsonl");
  expect_losses(file.steps, one, "pipelines");
  ASSERT_GE(file.rebalances.size(), 1u);
  EXPECT_EQ(
      std::ranges::count(
          file.rebalances, timeline::Divided::samples,
          &timeline::Rebalance::of),
      1);
  EXPECT_THAT(file.rebalances[0].seconds, ElementsAre(64, 16));
  EXPECT_THAT(file.rebalances[0].after, ElementsAre(16, 32));
}

// Rank 1 of each pipeline takes three times as long for a layer, and from step
// 21 on rank 0. The times are those of the cuts that follow.
double slow_stages(int rank, int64_t step, int64_t) {
  const bool first = rank % 2 == 0;
  if (step <= 6) return first ? 1 : 3;
  if (step <= 20) return 1.5;
  return first ? 4.5 : 0.5;
}

// Wherever a layer is, training computes the same. The state goes on in memory,
// or where there is none on the disk.
TEST_F(Trainer, StagesFollowTheSpeedOfRanks) {
  Job job = digits(1, 34);
  job.model.name = "mlp";
  job.model.hidden = {64, 64, 64, 64, 64, 64, 64};
  const auto one = run(job, "one");
  job.train.rebalance_every = 4;
  job.pipeline.microbatches = 4;
  job.elastic.memory_steps = 1000;
  const auto expect_cut = [&](const Layout& layout, const std::string& name) {
    SCOPED_TRACE(name);
    job.layout = layout;
    const auto folder =
        run(job, name, LayerFactory(), TrainDoors{.work_seconds = slow_stages});
    expect_same_run(folder, one, 1e-9);
    const auto cuts =
        timeline::read_metrics(folder / "metrics.jsonl").rebalances;
    ASSERT_EQ(cuts.size(), 2u);
    for (const auto& cut : cuts) {
      EXPECT_EQ(cut.of, timeline::Divided::layers);
      EXPECT_LT(cut.slowest_after(), 0.8 * cut.slowest_before());
    }
    EXPECT_EQ(cuts[0].step, 6);
    EXPECT_THAT(cuts[0].seconds, ElementsAre(1, 3));
    EXPECT_GT(cuts[0].after[0], cuts[0].after[1]);
    EXPECT_EQ(cuts[1].step, 24);
    EXPECT_EQ(cuts[1].before, cuts[0].after);
    EXPECT_LT(cuts[1].after[0], cuts[1].before[0]);
    EXPECT_THAT(
        read_text_file((folder / "report.html").string()),
        HasSubstr("after step 6: pipeline ranks work 1 s, 3 s with stages of"));
  };
  expect_cut({.pp = 2}, "pp=2");
  expect_cut({.dp_replicate = 2, .pp = 2}, "dp=2,pp=2");
  MemorySlots memory(4);
  ::setenv("ECHELON_MEMORY", memory.path().c_str(), 1);
  expect_cut({.dp_shard = 2, .pp = 2}, "fsdp=2,pp=2");
  EXPECT_EQ(memory.collect(), 24) << "the last cut's copy";
  ::unsetenv("ECHELON_MEMORY");
  const auto saved = list_checkpoints(
      folder_.path() + std::string("/fsdp=2,pp=2/checkpoints"));
  EXPECT_EQ(saved.size(), 1u) << "the one at the end";
}

// A change that costs more than the steps that are left would save.
TEST_F(Trainer, StagesStayWhereACutWouldNotPay) {
  Job job = digits(1, 12);
  job.model.name = "mlp";
  job.model.hidden = {64, 64, 64, 64, 64, 64, 64};
  job.layout = {.pp = 2};
  job.train.rebalance_every = 4;
  const TrainDoors doors{.work_seconds = [](int rank, int64_t, int64_t) {
    return rank == 0 ? 1e-7 : 3e-7;
  }};
  const auto file = timeline::read_metrics(
      run(job, "run", LayerFactory(), doors) / "metrics.jsonl");
  EXPECT_TRUE(file.rebalances.empty());
}

// The parts of a step are within it, and none is in two.
TEST_F(Trainer, StepsSayWhatTheyWereSpentOn) {
  for (const char* layout : {"dp=1", "dp=2", "fsdp=2", "pp=2", "tp=2"}) {
    SCOPED_TRACE(layout);
    Job job = digits(1, 12);
    job.layout = parse_layout(layout);
    job.train.timeline_steps = 2;
    for (const auto& step : steps(job, layout)) {
      ASSERT_TRUE(
          step.forward_seconds && step.backward_seconds && step.update_seconds);
      EXPECT_GT(*step.forward_seconds, 0);
      EXPECT_GT(*step.backward_seconds, 0);
      EXPECT_GT(*step.update_seconds, 0);
      EXPECT_EQ(
          step.communication_seconds.has_value(), job.layout.num_ranks() > 1);
      EXPECT_LE(
          step.data_seconds + *step.forward_seconds + *step.backward_seconds +
              *step.update_seconds + step.communication_seconds.value_or(0),
          step.step_seconds + 1e-6);
    }
  }
}

TEST_F(Trainer, ARunGoesOnWithItsDivision) {
  Job job = digits(2, 12);
  job.train.rebalance_every = 4;
  job.checkpoint.every_steps = 12;
  const auto folder = run(job, "run", LayerFactory(), slow_ranks(1000));
  EXPECT_THAT(
      read_text_file((folder / "report.html").string()),
      HasSubstr("after step 6: ranks work 24 ms, 72 ms for 24, 24 samples; "
                "from now on they take 36, 12"));
  job.train.steps = 20;
  std::vector<int64_t> sizes;
  const TrainDoors doors{
      .work_seconds = [&](int rank, int64_t, int64_t samples) {
        if (rank == 1) sizes.push_back(samples);
        return 1.0;
      }};
  job.train.rebalance_every = 1000;
  run_ranks(2, [&](World& world) {
    train(job, world, folder, LayerFactory(), doors);
  });
  EXPECT_THAT(sizes, ElementsAre(12, 12, 12, 12, 12, 12, 12, 12));
  EXPECT_EQ(
      timeline::read_metrics(folder / "metrics.jsonl").rebalances.size(), 1u);
}

// The last batch of an epoch: 2 samples, for as many as 8 passes.
TEST_F(Trainer, RanksAndPassesMayHaveNoSample) {
  const auto job = [](const Layout& layout, int64_t accumulate,
                      int64_t microbatches) {
    Job job = digits(1, 6);
    job.data.name = DataKind::dummy;
    job.data.samples = 50;
    job.data.shape = {1, 4, 4};
    job.data.classes = 3;
    job.data.holdout = 0;
    job.model.name = "mlp";
    job.model.hidden = {8, 6};
    job.layout = layout;
    job.pipeline.microbatches = microbatches;
    job.train.batch = 24;
    job.train.accumulate = accumulate;
    return job;
  };
  const auto one = steps(job({}, 1, 0), "one");
  ASSERT_EQ(one.size(), 6u);
  int cases = 0;
  for (const auto& [layout, accumulate, microbatches] :
       {std::tuple(Layout{}, 4, 0), std::tuple(Layout{.dp_replicate = 4}, 1, 0),
        std::tuple(Layout{.dp_replicate = 2}, 4, 0),
        std::tuple(Layout{.dp_shard = 3}, 1, 0),
        std::tuple(Layout{.dp_shard = 2}, 4, 0),
        std::tuple(Layout{.dp_shard = 2, .pp = 2}, 1, 4),
        std::tuple(Layout{.dp_replicate = 2, .tp = 2}, 4, 0)}) {
    const auto many =
        steps(job(layout, accumulate, microbatches), std::to_string(++cases));
    ASSERT_EQ(many.size(), one.size());
    for (size_t i = 0; i < one.size(); ++i) {
      EXPECT_NEAR(many[i].loss, one[i].loss, 1e-12) << "case " << cases;
    }
  }
}

TEST_F(Trainer, LeavesOutTheLastBatchOnDemand) {
  Job job = digits(2, 0);
  job.train.epochs = 2;
  job.train.batch = 500;  // of 1438 samples to train on
  const auto epochs = [&](const std::string& name) {
    std::vector<int64_t> samples;
    for (const auto& step : steps(job, name)) {
      samples.push_back(std::llround(step.epoch * 1438));
    }
    return samples;
  };
  EXPECT_THAT(epochs("all"), ElementsAre(500, 1000, 1438, 1938, 2438, 2876));
  job.data.drop_last = true;
  EXPECT_THAT(epochs("full"), ElementsAre(500, 1000, 1938, 2438));
  EXPECT_EQ(check_job(job, 2).steps, 4);
  const auto file = timeline::read_metrics(folder_.path("full/metrics.jsonl"));
  ASSERT_EQ(file.evaluations.size(), 2u);  // after each epoch
  EXPECT_EQ(file.evaluations.front().step, 2);
  EXPECT_EQ(file.evaluations.back().samples, 359);  // all that is held out
}

// With one sample and one pixel left, batch norm has nothing to take a mean of.
TEST_F(Trainer, WithoutTheLastBatchNormsHaveSamples) {
  Job job = digits(2, 0);
  job.model.name = "resnet18";
  job.data.name = DataKind::dummy;
  job.data.samples = 10;
  job.data.holdout = 0;
  job.data.shape = {3, 32, 32};
  job.train.epochs = 1;
  job.train.batch = 8;
  EXPECT_THAT(
      error_text<std::exception>([&] { steps(job, "all"); }),
      HasSubstr("more than 1 value per channel"));
  job.data.drop_last = true;
  EXPECT_EQ(steps(job, "full").size(), 1u);
}

TEST_F(Trainer, ALineHasTheMeansOfItsWindow) {
  Job job = digits(1, 20);
  job.train.log_every = 10;
  testing::internal::CaptureStdout();
  const auto all = steps(job, "run");
  const std::string out = testing::internal::GetCapturedStdout();
  double loss = 0, samples = 0, seconds = 0;
  for (size_t i = 10; i < 20; ++i) {
    loss += all[i].loss / 10;
    samples += 48;
    seconds += all[i].step_seconds;
  }
  const size_t at = out.find("step 20/20");
  ASSERT_NE(at, std::string::npos) << out;
  EXPECT_THAT(
      out.substr(at, out.find('\n', at) - at),
      testing::AllOf(
          HasSubstr(format("loss {:.4f}", loss)),
          HasSubstr(format_count(samples / seconds) + " samples/s")));
}

TEST_F(Trainer, WritesTheWholeRunFolder) {
  Job job = digits(2, 40);
  job.train.epochs = 0;
  job.train.timeline_steps = 40;
  const auto folder = run(job, "run");
  const auto file = timeline::read_metrics(folder / "metrics.jsonl");
  EXPECT_EQ(file.steps.size(), 40u);
  ASSERT_EQ(file.evaluations.size(), 2u);  // after the epoch, and at the end
  EXPECT_EQ(file.evaluations.back().samples, 359);
  EXPECT_GT(file.evaluations.back().accuracy, 0.5);
  const timeline::Timeline timeline =
      timeline::read_chrome_trace(folder / "timeline.json");
  for (int32_t rank : {0, 1}) {
    SCOPED_TRACE(rank);
    const auto has = [&](const auto& wanted) {
      return std::ranges::any_of(
          timeline.spans, [&](const timeline::Span& span) {
            return span.rank == rank && wanted(span);
          });
    };
    for (const char* name : {"forward", "backward", "optimizer", "data wait"}) {
      // Each step once, the first of an epoch too.
      std::vector<int64_t> in_step(40);
      for (const timeline::Span& span : timeline.spans) {
        if (span.rank == rank && span.name == name) {
          ++in_step.at(static_cast<size_t>(span.step));
        }
      }
      EXPECT_THAT(in_step, testing::Each(1)) << name;
    }
    EXPECT_TRUE(has([](const timeline::Span& span) {
      return span.track == "comm" &&
             span.name.find("bucket") != std::string::npos && span.bytes > 0 &&
             span.end_ns > span.begin_ns && span.axis == "dp_replicate";
    }));
    EXPECT_TRUE(has([](const timeline::Span& span) {
      return span.track == "compute" &&
             span.name == "wait for all_reduce step sums" &&
             span.kind == timeline::SpanKind::communication &&
             span.axis.empty();
    }));
  }
  EXPECT_TRUE(std::filesystem::exists(folder / "report.html"));
  EXPECT_TRUE(
      std::filesystem::exists(folder / "checkpoints" / "last.safetensors"));
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    EXPECT_THAT(
        entry.path().filename().string(), testing::Not(HasSubstr("spans-")));
  }
}

LayerList own_model(const std::string& name, int64_t outputs) {
  LayerList layers(name);
  layers.add_function(
      "flat", [](const torch::Tensor& x) { return x.flatten(1); });
  layers.add("out", [outputs] { return torch::nn::Linear(64, outputs); });
  return layers;
}

TEST_F(Trainer, AnOwnModelIsCalledByItsName) {
  const Job job = digits(1, 6);
  const LayerList layers = own_model("one_matrix", 10);
  const auto folder = run(job, "run", &layers);
  const auto says = [&](const char* file, const std::string& text) {
    return read_text_file(folder / file).find(text) != std::string::npos;
  };
  EXPECT_TRUE(says("report.html", "<h1>one_matrix on digits</h1>"));
  EXPECT_FALSE(says("report.html", "simple_cnn"));
  EXPECT_TRUE(says("layers.json", "one_matrix"));
  EXPECT_EQ(explain::explain_run(folder).title, "one_matrix on digits");
  const Job written = load_job((folder / "config.toml").string());
  EXPECT_EQ(written.model.name, kOwnModel);
  EXPECT_EQ(written.train.steps, 6);
  EXPECT_THAT(
      error_text<ConfigError>([&] { check_job(written, 1); }),
      HasSubstr("[model] name = \"own\": the layers are those of the program"));

  const LayerList unnamed = own_model("", 10);
  EXPECT_THAT(
      read_text_file(run(job, "unnamed", &unnamed) / "report.html"),
      HasSubstr("<h1>own model on digits</h1>"));
}

TEST_F(Trainer, AnOwnModelReturnsAScoreForEachClass) {
  const LayerList layers = own_model("two", 2);
  EXPECT_THAT(
      error_text<ConfigError>([&] { run(digits(1, 1), "run", &layers); }),
      HasSubstr(", 2], and there are 10 classes"));
}

TEST_F(Trainer, StartsFromTrainedWeights) {
  run(digits(2, 120), "first");
  Job job = digits(1, 1);
  job.model.weights = folder_.path("first/checkpoints/last.safetensors");
  const auto again = steps(job, "again");
  EXPECT_LT(again[0].loss, steps(digits(1, 1), "cold")[0].loss / 2);
}

thread_local bool on_slow_rank = false;

// The others wait for it in forward and backward: that is no work of theirs.
TEST_F(Trainer, TheSlowestRankIsTheOneThatComputesLonger) {
  LayerList layers;
  layers.add_function("flatten", [](const torch::Tensor& x) {
    if (on_slow_rank) {
      std::this_thread::sleep_for(std::chrono::milliseconds(40));
    }
    return x.flatten(1);
  });
  layers.add("fc", [] { return torch::nn::Linear(64, 32); });
  layers.add("head", [] { return torch::nn::Linear(32, 10); });
  // With a pipeline, the first layer of the second replica.
  for (const auto& [layout, slow] : std::vector<std::pair<std::string, int>>{
           {"dp=2", 1}, {"fsdp=2", 1}, {"dp=2,pp=2", 2}}) {
    Job job = digits(2, 12);
    job.data.holdout = 0;  // evaluating would be as slow as training
    job.layout = parse_layout(layout);
    const std::filesystem::path folder = folder_.make_folder(layout);
    run_ranks(static_cast<int>(job.layout.num_ranks()), [&](World& world) {
      on_slow_rank = world.rank() == slow;
      train(job, world, folder, &layers);
    });
    const auto steps = timeline::read_metrics(folder / "metrics.jsonl").steps;
    const auto named = std::ranges::count_if(
        steps, [&](const auto& step) { return step.slowest_rank == slow; });
    EXPECT_GT(named, 9) << layout;
  }
}

TEST_F(Trainer, ANanNamesStepRankAndLayer) {
  // The rank that gets the broken sample, and no layer, is at fault.
  Job job = with_broken_sample(digits(2, 10));
  const auto error = error_text<NumericError>([&] { run(job, "nan"); });
  EXPECT_THAT(error, HasAll("step 1: the loss of rank 1", "the input batch"));
  // Other ranks look for it in every layer, which they unshard together.
  for (const char* layout : {"fsdp=2", "fsdp=2,tp=2", "dp=2,fsdp=2"}) {
    job.layout = parse_layout(layout);
    EXPECT_THAT(
        error_text<NumericError>([&] { run(job, layout); }),
        HasAll("step 1: the loss of rank ", "the input batch"));
  }
}

TEST_F(Trainer, DivergenceNamesTheLayer) {
  Job job = digits(2, 50);
  job.optimizer.name = OptimizerKind::sgd;
  job.optimizer.learning_rate = 1e200;
  const auto error = error_text<NumericError>([&] { run(job, "diverges"); });
  EXPECT_THAT(error, HasAll("is not a finite number", "in layer conv"));
  // What was measured until then is kept.
  EXPECT_GE(
      timeline::read_metrics(folder_.path("diverges/metrics.jsonl"))
          .steps.size(),
      1u);
}

TEST_F(Trainer, ASignalEndsTheRunAfterACompleteStep) {
  install_stop_signals();
  Job job = digits(2, 1000000);
  const std::filesystem::path folder = folder_.make_folder("stopped");
  std::thread signaller([&] {
    while (!std::filesystem::exists(folder / "metrics.jsonl") ||
           std::filesystem::file_size(folder / "metrics.jsonl") < 4000) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    std::raise(SIGINT);
  });
  run_ranks(2, [&](World& world) {
    const TrainResult result = train(job, world, folder);
    EXPECT_TRUE(result.interrupted);
    EXPECT_GT(result.steps, 0);
  });
  signaller.join();
  std::signal(SIGINT, SIG_DFL);
  EXPECT_TRUE(std::filesystem::exists(folder / "report.html"));
  EXPECT_TRUE(
      std::filesystem::exists(folder / "checkpoints" / "last.safetensors"));
}

}  // namespace echelon::trainer_test
