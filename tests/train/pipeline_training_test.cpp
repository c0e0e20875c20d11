// Pipelines in the training loop and in verify: against one device, and beside
// data parallelism.
#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <set>

#include "echelon/checkpoint/tensors/tensor_file.h"
#include "echelon/job/pipeline_schedule.h"
#include "echelon/timeline/chrome_trace.h"
#include "echelon/timeline/metrics.h"
#include "echelon/train/strategies/parallel_model.h"
#include "echelon/train/trainer.h"
#include "echelon/train/verify.h"
#include "tests/support/error_text.h"
#include "tests/train/trained_runs.h"

namespace echelon::pipeline_training_test {

using testing::HasSubstr;
using torch::Tensor;

Job mlp_job(int64_t pp, const std::string& schedule, int64_t dp = 1) {
  Job job;
  job.model.name = "mlp";
  job.model.hidden = {20, 18, 16, 14, 12, 11, 10, 10, 10};  // 10 layers
  job.layout.pp = pp;
  job.layout.dp_replicate = dp;
  job.pipeline.schedule = schedule_kind(schedule);
  job.train.steps = 5;
  job.train.batch = 48;
  job.optimizer.clip_norm = 0.1;
  return job;
}

class EverySchedule : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(
    Kinds, EverySchedule, testing::ValuesIn(schedule_names()),
    schedule_test_name);

TEST_P(EverySchedule, EqualsOneDevice) {
  for (const int64_t pp : {2, 3, 4}) {
    EXPECT_EQ(
        expect_equal_to_one_device(mlp_job(pp, GetParam())), 2 * (1 + 2 * 20));
  }
}

TEST_P(EverySchedule, EqualsOneDeviceWithDataParallelism) {
  expect_equal_to_one_device(mlp_job(2, GetParam(), 2));
}

TEST(VerifyPipeline, FindsAPlantedFactorOfTwo) {
  const VerifyOptions options{.steps = 2, .plant_error = "fc7.weight"};
  const auto result = result_of(mlp_job(3, "1f1b"), options);
  EXPECT_FALSE(result.passed);
  EXPECT_THAT(to_text(result, options), HasSubstr("fc7.weight"));
}

TEST(VerifyPipeline, SimpleCnnAndResnet) {
  Job job = mlp_job(3, "1f1b");
  job.model.name = "simple_cnn";
  expect_equal_to_one_device(job);

  job = mlp_job(2, "gpipe");
  job.model.name = "resnet18";
  job.data.name = DataKind::dummy;
  job.data.samples = 32;
  job.data.shape = {3, 32, 32};
  job.train.batch = 4;
  job.pipeline.microbatches = 1;  // batch statistics are a microbatch's
  expect_equal_to_one_device(job);

  job.pipeline.microbatches = 2;
  const auto result = result_of(job);
  EXPECT_FALSE(result.passed);
  EXPECT_THAT(result.hint, HasSubstr("microbatch"));
}

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width) {
    fc = register_module("fc", torch::nn::Linear(width, width));
  }
  std::tuple<Tensor, Tensor> forward(const Tensor& x, const Tensor& skip) {
    return {torch::tanh(fc(x)), skip};
  }
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(Block);

// The input of the first block is added behind the last one.
LayerList skip_list() {
  LayerList list;
  list.add_function("flatten", [](const Tensor& x) { return x.flatten(1); });
  list.add("in", [] { return torch::nn::Linear(64, 12); });
  list.add_function(
      "fork", [](const Tensor& x) { return std::make_tuple(x, x.tanh()); });
  for (const char* name : {"b1", "b2", "b3", "b4"}) {
    list.add(name, [] { return Block(12); });
  }
  list.add_function(
      "join", [](const Tensor& x, const Tensor& skip) { return x + skip; });
  list.add("out", [] { return torch::nn::Linear(12, 10); });
  return list;
}

struct ProjectImpl : torch::nn::Module {
  ProjectImpl(int64_t out, int64_t in) {
    weight = register_parameter("weight", torch::randn({out, in}) * 0.2);
  }
  Tensor forward(const Tensor& x) { return torch::tanh(x.mm(weight.t())); }
  Tensor weight;
};
TORCH_MODULE(Project);

// Three layers share one parameter.
LayerList tied_list() {
  LayerList list;
  list.add_function("flatten", [](const Tensor& x) { return x.flatten(1); });
  list.add("in", [] { return torch::nn::Linear(64, 12); });
  for (const char* name : {"p1", "p2", "p3", "p4"}) {
    list.add(name, [] { return Project(12, 12); });
  }
  list.add("out", [] { return torch::nn::Linear(12, 10); });
  list.tie("p1.weight", "p3.weight").tie("p3.weight", "p4.weight");
  return list;
}

TEST_P(EverySchedule, SkipConnectionAcrossStages) {
  const LayerList list = skip_list();
  for (const int64_t pp : {2, 3, 4}) {
    expect_equal_to_one_device(mlp_job(pp, GetParam()), whole_layers(list));
  }
}

TEST_P(EverySchedule, TiedWeightsAcrossStages) {
  const LayerList list = tied_list();
  for (const int64_t pp : {2, 3}) {
    const Job job = mlp_job(pp, GetParam());
    EXPECT_EQ(
        expect_equal_to_one_device(job, whole_layers(list), 3),
        3 * (1 + 2 * 6));
  }
  expect_equal_to_one_device(mlp_job(2, GetParam(), 2), whole_layers(list), 3);
}

TEST(VerifyPipeline, EveryBalanceAndPartition) {
  for (const auto balance :
       {StageBalance::time, StageBalance::memory, StageBalance::measured}) {
    Job job = mlp_job(3, "1f1b");
    job.model.balance = balance;
    expect_equal_to_one_device(job);
  }
  Job job = mlp_job(3, "1f1b");
  job.model.partition_at = {"fc2", "fc9"};
  expect_equal_to_one_device(job);
}

// The layers with parameters on each rank, by their first parameter's name.
std::vector<std::set<std::string>> layers_of_ranks(const Job& job) {
  std::vector<std::set<std::string>> layers(
      static_cast<size_t>(job.layout.num_ranks()));
  on_models(job, [&](World& world, const MeshGroups&, ParallelModel& model) {
    for (const auto& part : model.parameters()) {
      layers[static_cast<size_t>(world.rank())].insert(
          part.name.substr(0, part.name.find('.')));
    }
  });
  return layers;
}

// Equal results do not show that the partition is the requested one.
TEST(PipelinePartition, EachRankHoldsItsOwnLayersOnly) {
  using Layers = std::set<std::string>;
  Job job = mlp_job(3, "1f1b");
  job.model.partition_at = {"fc2", "fc9"};
  EXPECT_THAT(
      layers_of_ranks(job),
      testing::ElementsAre(
          Layers{"fc1"},
          Layers{"fc2", "fc3", "fc4", "fc5", "fc6", "fc7", "fc8"},
          Layers{"fc9", "fc10"}));
  // V-shaped: the first and the last stage are on one rank.
  job = mlp_job(2, "zb-v");
  job.model.partition_at = {"fc2", "fc3", "fc4"};
  EXPECT_THAT(
      layers_of_ranks(job),
      testing::ElementsAre(
          Layers{"fc1", "fc4", "fc5", "fc6", "fc7", "fc8", "fc9", "fc10"},
          Layers{"fc2", "fc3"}));
}

TEST(PipelinePartition, FollowsWhatIsBalanced) {
  using Layers = std::set<std::string>;
  // One microbatch: work and memory both lie in the widest matrix, fc3.
  Job job = mlp_job(2, "gpipe");
  job.model.hidden = {8, 64, 512, 8, 8};
  job.model.balance = StageBalance::time;
  EXPECT_THAT(
      layers_of_ranks(job),
      testing::ElementsAre(
          Layers{"fc1", "fc2", "fc3"}, Layers{"fc4", "fc5", "fc6"}));
  // Equal layers: equal work. But 1F1B's first stage stores twice as many
  // microbatches as its second, so by memory it gets fewer of them.
  job = mlp_job(2, "1f1b");
  job.model.hidden.assign(9, 64);
  job.train.batch = 4096;
  job.pipeline.microbatches = 8;
  EXPECT_EQ(layers_of_ranks(job)[0].size(), 5u);
  job.model.balance = StageBalance::memory;
  EXPECT_LT(layers_of_ranks(job)[0].size(), 5u);
}

TEST(VerifyPipeline, WhatDoesNotFitIsRefusedWithNumbers) {
  const auto message_of = [](const Job& job) {
    return error_text<ConfigError>([&] { result_of(job); });
  };
  Job job = mlp_job(2, "1f1b");
  job.model.device_bytes = {1 << 20, 2000};
  EXPECT_THAT(message_of(job), HasSubstr("of its 1.95 KiB"));
  job.model.partition_at = {"fc5"};
  EXPECT_THAT(message_of(job), HasSubstr("of its 1.95 KiB"));
  job.model.device_bytes = {1 << 20, 1 << 20};
  EXPECT_TRUE(result_of(job).passed);
}

Job placed_job(int64_t devices, int64_t dp = 1) {
  Job job = mlp_job(1, "1f1b", dp);
  job.model.devices.assign(static_cast<size_t>(devices), "cpu");
  return job;
}

TEST(VerifyPlacement, EqualsOneDevice) {
  for (const int64_t devices : {1, 2, 3, 4}) {
    for (const int64_t dp : {1, 2}) {
      expect_equal_to_one_device(placed_job(devices, dp));
    }
  }
  for (const auto balance : {StageBalance::memory, StageBalance::measured}) {
    Job job = placed_job(3);
    job.model.balance = balance;
    expect_equal_to_one_device(job);
  }
  for (const LayerList& list : {skip_list(), tied_list()}) {
    expect_equal_to_one_device(placed_job(3), whole_layers(list), 3);
  }
}

TEST(VerifyPlacement, WhatDoesNotFitIsRefusedWithNumbers) {
  Job job = placed_job(2);
  job.model.device_bytes = {1000, 1000};
  EXPECT_THAT(
      error_text<ConfigError>([&] { result_of(job); }),
      HasSubstr("of its 1,000 B"));
}

using PipelineTraining = TrainedRuns;

TEST_F(PipelineTraining, FollowsTheCurveOfOneDeviceAndSavesTheSameModel) {
  Job one = mlp_job(1, "1f1b");
  one.model.dtype = ModelDtype::float64;
  one.train.steps = 30;
  one.optimizer.learning_rate = 3e-3;
  const auto expected = run(one, "one");
  for (const auto& [pp, dp, schedule] :
       std::vector<std::tuple<int64_t, int64_t, std::string>>{
           {2, 1, "1f1b"}, {2, 2, "zb-h1"}, {4, 1, "gpipe"}}) {
    SCOPED_TRACE(schedule);
    Job job = one;
    job.layout.pp = pp;
    job.layout.dp_replicate = dp;
    job.pipeline.schedule = schedule_kind(schedule);
    expect_same_run(run(job, schedule), expected, 1e-9);
  }
}

TEST_F(PipelineTraining, TiedWeightsAreSavedOnce) {
  const LayerList list = tied_list();
  Job one = mlp_job(1, "1f1b");
  one.train.steps = 12;
  const auto expected = load_tensors(last_weights(run(one, "one", &list)));
  const std::map<std::string, Tensor> by_name(expected.begin(), expected.end());
  EXPECT_EQ(by_name.count("p1.weight"), 1u);
  EXPECT_EQ(by_name.count("p3.weight") + by_name.count("p4.weight"), 0u);
  for (const char* schedule : {"gpipe", "zb-v"}) {
    Job job = mlp_job(3, schedule);
    job.train.steps = one.train.steps;
    const auto saved = load_tensors(last_weights(run(job, schedule, &list)));
    ASSERT_EQ(saved.size(), expected.size()) << schedule;
    for (const auto& [name, tensor] : saved) {
      EXPECT_TRUE(tensor.allclose(by_name.at(name), 1e-3, 1e-5)) << name;
    }
  }
}

TEST_F(PipelineTraining, TheTimelineHasEveryActionOfTheSchedule) {
  Job job = mlp_job(2, "interleaved");
  job.train.steps = 12;
  const auto folder = run(job, "run");
  const timeline::Timeline timeline =
      timeline::read_chrome_trace(folder / "timeline.json");
  const Schedule schedule = pipeline_schedule(job);
  int64_t last = 0;
  for (const auto& span : timeline.spans) last = std::max(last, span.step);
  for (int32_t rank = 0; rank < 2; ++rank) {
    std::set<std::string> names;
    for (const auto& span : timeline.spans) {
      if (span.rank == rank && span.step == last) names.insert(span.name);
    }
    for (const auto& action : schedule.ranks[static_cast<size_t>(rank)]) {
      EXPECT_TRUE(names.count(to_string(action)) > 0) << to_string(action);
    }
  }
}

TEST_F(PipelineTraining, DevicesOfOneProcessShowInTheTimeline) {
  Job job = placed_job(2);
  job.train.steps = 12;
  const auto folder = run(job, "run");
  const timeline::Timeline timeline =
      timeline::read_chrome_trace(folder / "timeline.json");
  std::set<std::string> seen;
  for (const auto& span : timeline.spans) {
    seen.insert(span.track + " " + span.name);
  }
  for (const char* name :
       {"device 0 forward", "device 1 forward", "device 1 backward",
        "device 0 backward"}) {
    EXPECT_EQ(seen.count(name), 1u) << name;
  }
}

TEST_F(PipelineTraining, ANanNamesTheStepTheRankAndTheLayer) {
  const Job job = with_broken_sample(mlp_job(2, "1f1b"));
  const auto error = error_text<NumericError>([&] { run(job, "nan"); });
  EXPECT_THAT(error, HasAll("step 1: the loss of rank 1", "the input batch"));
}

TEST_F(PipelineTraining, DivergenceNamesTheFirstLayerOfAnEarlierStage) {
  Job job = mlp_job(3, "1f1b");
  job.optimizer.name = OptimizerKind::sgd;
  job.optimizer.clip_norm = 0;
  job.optimizer.learning_rate = 1e38;
  job.train.steps = 20;
  const auto error = error_text<NumericError>([&] { run(job, "diverges"); });
  EXPECT_THAT(error, HasAll("the loss of rank 2", "layer fc2 (output)"));
}

TEST_F(PipelineTraining, StartsFromWeightsOfOneDevice) {
  Job one = mlp_job(1, "1f1b");
  one.train.steps = 60;
  one.optimizer.learning_rate = 1e-2;
  one.optimizer.clip_norm = 0;
  const auto first = run(one, "one");
  const double trained =
      timeline::read_metrics(first / "metrics.jsonl").steps.back().loss;
  Job job = mlp_job(2, "1f1b");
  job.train.steps = 1;
  job.model.weights = last_weights(first);
  EXPECT_LT(steps(job, "again")[0].loss, trained * 1.5);
}

}  // namespace echelon::pipeline_training_test
