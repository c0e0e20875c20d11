#include "echelon/predict/predict_run.h"

#include <gmock/gmock.h>

#include <cstdlib>

#include "echelon/cluster/catalogue.h"
#include "echelon/cluster/cluster_file.h"
#include "echelon/cluster/local_cluster.h"
#include "echelon/cost/framework.h"
#include "echelon/cost/model_catalogue.h"
#include "tests/support/measured_desk.h"
#include "tests/support/temp_folder.h"

namespace echelon::predict::predict_run_test {

using testing::HasSubstr;
using testing::StartsWith;

// The saved figures of this machine are those of the test, or none.
class PredictRun : public testing::Test {
 protected:
  PredictRun() { ::setenv("XDG_CONFIG_HOME", folder_.path().c_str(), 1); }
  ~PredictRun() override { ::unsetenv("XDG_CONFIG_HOME"); }

  void save(int64_t ranks, const std::string& text) {
    const auto path = cluster::saved_cluster_path(ranks);
    folder_.write(
        std::filesystem::relative(path, folder_.path()).string(), text);
  }

  TempFolder folder_;
};

Job cnn_job(const std::string& more = "") {
  return parse_job(
      "[model]\nname = \"simple_cnn\"\n[data]\nname = \"digits\"\n"
      "[train]\nsteps = 20\nbatch = 64\n[layout]\ndp = 2\n" +
          more,
      "test.toml");
}

JobFacts digits() {
  JobFacts facts;
  facts.data.sample_shape = {1, 8, 8};
  facts.classes = 10;
  return facts;
}

TEST_F(PredictRun, PartsAddUpToTheSimulatedStep) {
  struct {
    const char* model;
    Layout layout;
    const char* axis;
  } const cases[] = {
      {"gpt2", {.dp_replicate = 8}, "dp_replicate"},
      {"gpt2", {.dp_replicate = 2, .tp = 4}, "tp"},
      {"gpt2", {.dp_replicate = 2, .pp = 4}, nullptr}};
  const cluster::Cluster cluster = cluster::find_cluster("h100-sxm:1x8");
  for (const auto& one : cases) {
    Configured what{.model = cost::find_model(one.model)};
    what.strategy.layout = one.layout;
    what.strategy.global_batch = 64;
    const report::StepPrediction prediction = predict_step(what, cluster);
    const simulator::SimulatedRun run =
        simulator::simulate(what.model, what.strategy, cluster);
    EXPECT_EQ(prediction.step_seconds, run.step.step_seconds);
    EXPECT_NEAR(
        prediction.parts.step_seconds(), run.step.step_seconds,
        0.001 * run.step.step_seconds);
    EXPECT_GT(prediction.parts.backward, prediction.parts.forward);
    EXPECT_GT(prediction.parts.optimizer, 0);
    if (one.axis) {
      EXPECT_GT(prediction.parts.exposed.at(one.axis), 0);
    }
    EXPECT_EQ(prediction.parts.stages > 0, one.layout.pp > 1);
    ASSERT_EQ(prediction.memory.size(), 8u);
    // Ranks 0 and 7 are the pipeline's first and last.
    EXPECT_EQ(
        prediction.memory[0].memory.bytes, run.step.memory.ranks.front().bytes);
    EXPECT_EQ(
        prediction.memory[7].memory.bytes, run.step.memory.ranks.back().bytes);
  }
}

// [model] overrides of a named size count for the prediction as for training.
TEST_F(PredictRun, ANamedSizeTakesTheConfigurationsNumbers) {
  const auto shape_of = [](const std::string& model) {
    const Job job = parse_job(
        "[model]\n" + model +
            "\n[data]\nname = \"digits\"\n[train]\nsteps = 1\nbatch = 8\n",
        "test.toml");
    JobFacts facts;
    facts.data.sample_shape = {16};
    facts.classes = 50257;
    const cost::ModelShape model_shape = configured(job, facts).model;
    EXPECT_EQ(model_shape.seq_len, 16);
    return *model_shape.transformer;
  };
  const TransformerShape gpt2 = *cost::find_model("gpt2").transformer;
  EXPECT_EQ(shape_of("name = \"gpt2\""), gpt2);
  TransformerShape longer = gpt2;
  longer.positions = 2048;
  EXPECT_EQ(shape_of("name = \"gpt2\"\nmax_positions = 2048"), longer);
  // There are as many heads of keys and values as of queries, as in the named
  // size.
  EXPECT_EQ(
      shape_of("name = \"llama-160m\"\nheads = 6\nvocab_size = 60000")
          .key_value_heads(),
      6);
}

TEST_F(PredictRun, TakesTheOptimizerAndTheTypeOfSums) {
  Job job = cnn_job();
  job.optimizer.name = OptimizerKind::sgd;
  job.optimizer.momentum = 0.9;
  job.precision.reduce = ReduceDtype::float32;
  const cost::Strategy strategy = configured_strategy(job);
  EXPECT_EQ(strategy.optimizer, OptimizerKind::sgd);
  EXPECT_EQ(strategy.momentum, 0.9);
  EXPECT_EQ(strategy.reduce, ReduceDtype::float32);
}

// TF32 has float32's memory and rates of its own, fp8 bf16's memory.
TEST_F(PredictRun, TakesTheRatesOfTf32AndFp8) {
  Job job;
  const auto step_in = [&](ComputeDtype compute) {
    job.precision.compute = compute;
    Configured what{
        .model = cost::find_model("gpt2"),
        .strategy = configured_strategy(job)};
    what.strategy.microbatch_size = what.strategy.global_batch;
    return predict_step(what, cluster::find_cluster("h100-sxm:1"));
  };
  const auto wide = step_in(ComputeDtype::same);
  const auto tf32 = step_in(ComputeDtype::tf32);
  const auto low = step_in(ComputeDtype::bf16);
  EXPECT_EQ(configured_strategy(job).precision, cluster::Precision::bf16);
  EXPECT_LT(tf32.step_seconds, 0.4 * wide.step_seconds);
  EXPECT_GT(tf32.step_seconds, 1.3 * low.step_seconds);
  EXPECT_EQ(tf32.memory[0].memory.bytes, wide.memory[0].memory.bytes);
  // Products of 8 bits, and the memory of bf16.
  const auto least = step_in(ComputeDtype::fp8);
  EXPECT_LT(least.step_seconds, 0.95 * low.step_seconds);
  EXPECT_GT(least.step_seconds, 0.5 * low.step_seconds);
  EXPECT_EQ(least.memory[0].memory.bytes, low.memory[0].memory.bytes);
}

// As the trainer does (doc/context_parallel.md): over fsdp and cp, where fsdp
// is above 1 or the precision is lower.
TEST_F(PredictRun, ShardsOverRanksOfContextParallelism) {
  const auto shards = [](const Layout& layout, ComputeDtype compute) {
    Job job;
    job.layout = layout;
    job.precision.compute = compute;
    job.shard.stage = 2;
    const cost::Strategy strategy = configured_strategy(job);
    const double ranks =
        cost::zero_shards(strategy, cost::find_framework("echelon"), false);
    return std::pair(strategy.zero_stage, ranks);
  };
  EXPECT_EQ(
      shards({.dp_shard = 2, .cp = 4}, ComputeDtype::same), std::pair(2L, 8.0));
  EXPECT_EQ(shards({.cp = 4}, ComputeDtype::bf16), std::pair(2L, 4.0));
  EXPECT_EQ(shards({.cp = 4}, ComputeDtype::same), std::pair(0L, 1.0));
  EXPECT_EQ(
      shards({.dp_replicate = 4}, ComputeDtype::bf16), std::pair(0L, 1.0));
}

TEST_F(PredictRun, ABubbleIsWhatTheScheduleSays) {
  Configured what{.model = cost::find_model("gpt3-175b")};
  what.strategy.layout = {.tp = 8, .pp = 4};
  what.strategy.global_batch = 8;
  const report::StepPrediction prediction =
      predict_step(what, cluster::find_cluster("h100-sxm:4x8"));
  // 1F1B leaves (4 - 1) of (8 + 4 - 1) empty; the stages are not quite alike.
  const double share = prediction.parts.stages / prediction.step_seconds;
  EXPECT_NEAR(share, 3.0 / 11, 0.05);
}

TEST_F(PredictRun, OnAProcessorNeedsItsMeasuredRates) {
  const RunCluster unknown = cluster_of_run(2, true);
  EXPECT_FALSE(unknown.cluster);
  EXPECT_THAT(unknown.missing, HasSubstr("`echelon bench --save -n 2`"));

  save(2, kMeasuredDesk);
  const RunCluster known = cluster_of_run(2, true);
  ASSERT_TRUE(known.cluster) << known.missing;
  const report::StepPrediction some =
      predict_step(configured(cnn_job(), digits()), *known.cluster);
  EXPECT_EQ(some.cluster, "this machine as measured");
  EXPECT_EQ(some.memory.size(), 2u);
  EXPECT_NEAR(some.parts.step_seconds(), some.step_seconds, 1e-9);
  // Rates of 2 ranks say nothing of those of 4.
  EXPECT_FALSE(cluster_of_run(4, true).cluster);
}

TEST_F(PredictRun, RatesOfGpusAreNoneOfAProcessor) {
  save(2, "[[nodes]]\ndevice = \"h100-sxm\"\ndevices = 2\n");
  const RunCluster none = cluster_of_run(2, true);
  EXPECT_FALSE(none.cluster);
  EXPECT_THAT(none.missing, HasSubstr("rates of this processor are not known"));
}

// What a software does beside computing and sending has no spans.
TEST_F(PredictRun, TheRestOfAStepIsAPartOfIt) {
  Configured what{.model = cost::find_model("gpt2")};
  what.strategy.layout = {.dp_shard = 8};
  what.strategy.zero_stage = 3;
  what.strategy.global_batch = 64;
  what.strategy.framework = "fsdp";
  const double host = cost::find_framework("fsdp").step_host_seconds;
  ASSERT_GT(host, 0.01);
  const report::StepPrediction some =
      predict_step(what, cluster::find_cluster("h100-sxm:1x8"));
  EXPECT_NEAR(some.parts.other, host, 1e-3 * host);
  EXPECT_NEAR(
      some.parts.step_seconds(), some.step_seconds, 1e-6 * some.step_seconds);
}

// All stages are looked at, of a long pipeline too.
TEST_F(PredictRun, PartsAreMeansOverAllStages) {
  Configured what{.model = cost::find_model("gpt3-175b")};
  what.strategy.layout = {.tp = 2, .pp = 32};
  what.strategy.global_batch = 32;
  const cluster::Cluster cluster = cluster::find_cluster("h100-sxm:8x8");
  const timeline::TimedParts some = predict_step(what, cluster).parts;
  const timeline::TimedParts all =
      prediction_of(
          simulator::simulate(
              what.model, what.strategy, cluster, {.timeline_ranks = 64}),
          what.strategy, cluster)
          .parts;
  EXPECT_NEAR(some.forward, all.forward, 1e-3 * all.forward);
  EXPECT_NEAR(some.stages, all.stages, 1e-3 * all.stages);
}

// The first ranks are looked at; those that the step waits for may be others.
TEST_F(PredictRun, AStepLastsUntilTheLastRankHasUpdated) {
  Configured what{.model = cost::find_model("gpt2")};
  what.strategy.layout = {.dp_replicate = 128};
  what.strategy.global_batch = 512;
  const report::StepPrediction mixed =
      predict_step(what, cluster::find_cluster("h100-sxm:8x8+v100:8x8"));
  EXPECT_GT(mixed.parts.other, 0.01 * mixed.step_seconds);
  EXPECT_NEAR(
      mixed.parts.step_seconds(), mixed.step_seconds,
      1e-6 * mixed.step_seconds);
}

TEST_F(PredictRun, SaysWhatKeepsItFromPredicting) {
  save(2, "nodes = 3\n");
  const RunCluster broken = cluster_of_run(2, true);
  EXPECT_FALSE(broken.cluster);
  EXPECT_THAT(
      broken.missing, HasSubstr(cluster::saved_cluster_path(2).string()));
  EXPECT_THAT(broken.missing, StartsWith("Nothing is predicted: "));
}

TEST_F(PredictRun, TheNamesOfRanksSayWhereTheyComputed) {
  timeline::Timeline timeline;
  EXPECT_FALSE(ran_on_processor(timeline));
  timeline.rank_names = {"rank 0 (cuda:0)"};
  EXPECT_FALSE(ran_on_processor(timeline));
  timeline.rank_names = {"rank 0 (cpu)", "rank 1 (cpu)"};
  EXPECT_TRUE(ran_on_processor(timeline));
}

TEST_F(PredictRun, FilesOfThisMachineLieInTheConfigurationFolder) {
  const auto path = cluster::saved_cluster_path(2);
  EXPECT_EQ(path.parent_path(), folder_.path("echelon/clusters"));
  EXPECT_THAT(path.filename().string(), testing::EndsWith("-2.toml"));
  EXPECT_NE(path, cluster::saved_cluster_path(3));
  ::setenv("XDG_CONFIG_HOME", "not/absolute", 1);
  EXPECT_THAT(
      cluster::saved_cluster_path(2).string(),
      HasSubstr("/.config/echelon/clusters/"));
}

}  // namespace echelon::predict::predict_run_test
