// Layers that are sharded over ranks, in the training loop and in verify,
// against one device; also beside data parallelism and pipelines.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <limits>
#include <mutex>
#include <set>

#include "echelon/comm/world.h"
#include "echelon/counting/layer_cost.h"
#include "echelon/parallel/tensor/linear.h"
#include "echelon/timeline/metrics.h"
#include "echelon/train/report_writer.h"
#include "echelon/train/strategies/parallel_model.h"
#include "echelon/train/trainer.h"
#include "echelon/train/verify.h"
#include "tests/support/error_text.h"
#include "tests/train/trained_runs.h"

namespace echelon::tensor_training_test {

using testing::HasSubstr;

// Two matrices, sharded by outputs and by inputs.
LayerList block(const TensorParallel& parallel) {
  LayerList layers;
  layers.add(
      "up",
      [=] {
        return std::make_shared<ColumnParallelLinear>(
            LinearShape{.in = 6, .out = 9}, parallel, "up");
      },
      [](ColumnParallelLinear& up, torch::Tensor x) {
        return up.forward(x, 20);
      });
  layers.add("down", [=] {
    return std::make_shared<RowParallelLinear>(
        LinearShape{.in = 9, .out = 6}, parallel, "down");
  });
  return layers;
}

// One rank alone counts what it holds of layers that all ranks compute.
TEST(CountLayers, AsksNoOtherRank) {
  run_ranks(2, [](World& world) {
    if (world.rank() == 1) return;
    for (const auto& group : {world.group(), Group::silent("tp", 0, 2)}) {
      TensorParallel parallel{group, {}};
      auto costs = counting::count_layers(block(parallel), {{{20, 6}}});
      EXPECT_EQ(costs[0].parameters, 5 * 6 + 5);
      EXPECT_EQ(costs[1].parameters, 6 * 5 + 6);
      EXPECT_DOUBLE_EQ(costs[0].forward_flops, 2.0 * 20 * 6 * 5);
      EXPECT_EQ(costs[1].outputs[0].shape, (std::vector<int64_t>{20, 6}));

      parallel.options.sequence_parallel = true;
      costs = counting::count_layers(block(parallel), {{{10, 6}}});
      EXPECT_EQ(costs[0].outputs[0].shape, (std::vector<int64_t>{20, 5}));
      EXPECT_EQ(costs[1].outputs[0].shape, (std::vector<int64_t>{10, 6}));
      EXPECT_GT(costs[1].backward_flops, costs[1].forward_flops);
    }
    EXPECT_EQ(world.history().count(), 0U);
  });
}

// Layers for the digits, with widths that do not divide: a matrix sharded by
// outputs, one by inputs, a layer that every rank has whole, and scores that
// are gathered.
LayerList cut_list(const TensorParallel& parallel) {
  LayerList layers;
  layers.add(
      "up",
      [=] {
        return std::make_shared<ColumnParallelLinear>(
            LinearShape{.in = 64, .out = 13}, parallel, "up");
      },
      [](ColumnParallelLinear& up, torch::Tensor x) {
        return torch::tanh(up.forward(x.flatten(1)));
      });
  layers.add(
      "down",
      [=] {
        return std::make_shared<RowParallelLinear>(
            LinearShape{.in = 13, .out = 7}, parallel, "down");
      },
      [](RowParallelLinear& down, torch::Tensor x) { return down.forward(x); });
  layers.add("whole", [] { return torch::nn::Linear(7, 11); });
  layers.add(
      "head",
      [=] {
        return std::make_shared<ColumnParallelLinear>(
            LinearShape{.in = 11, .out = 10}, parallel, "head", true);
      },
      [](ColumnParallelLinear& head, torch::Tensor x) {
        return head.forward(torch::tanh(x));
      });
  return layers;
}

Job cut_job(const Layout& layout) {
  Job job;
  job.layout = layout;
  job.train.steps = 5;
  job.train.batch = 24;
  job.optimizer.clip_norm = 0.1;
  return job;
}

TEST(TensorParallelTraining, EqualsOneDevice) {
  for (const Layout& layout : parse_layouts(
           {"tp=2", "tp=3", "tp=4", "dp=2,tp=2", "tp=2,pp=2", "tp=2,pp=3",
            "dp=2,tp=2,pp=2"})) {
    Job job = cut_job(layout);
    EXPECT_EQ(expect_equal_to_one_device(job, cut_list), 2 * (1 + 2 * 8));
  }
}

class EveryScheduleWithTensorParallel
    : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(
    Kinds, EveryScheduleWithTensorParallel, testing::ValuesIn(schedule_names()),
    schedule_test_name);

TEST_P(EveryScheduleWithTensorParallel, EqualsOneDeviceInThreeDimensions) {
  Job job = cut_job({.dp_replicate = 2, .tp = 2, .pp = 2});
  job.pipeline.schedule = schedule_kind(GetParam());
  job.train.batch = 48;
  expect_equal_to_one_device(job, cut_list);
}

TEST(TensorParallelTraining, AccumulatesAndMayHaveUnevenBatches) {
  Job job = cut_job({.dp_replicate = 2, .tp = 2});
  job.train.accumulate = 3;
  EXPECT_TRUE(result_of(job, {.steps = 2}, cut_list).passed);
  job.train.accumulate = 1;
  job.train.rank_batch = {19, 5};
  EXPECT_TRUE(result_of(job, {.steps = 2}, cut_list).passed);
}

TEST(TensorParallelTraining, APlantedErrorIsFound) {
  const Job job = cut_job({.tp = 2});
  for (const char* name : {"up.weight", "down.bias", "whole.weight"}) {
    const auto result =
        result_of(job, {.steps = 1, .plant_error = name}, cut_list);
    EXPECT_FALSE(result.passed);
    EXPECT_EQ(result.worst[0].what, std::string("gradient ") + name);
  }
}

// What a rank computes of the layer "down" is wrong by a factor.
LayerList broken_list(const TensorParallel& parallel, double factor) {
  LayerList broken;
  const LayerList layers = cut_list(parallel);
  for (auto definition : layers.layers()) {
    if (definition.name == "down" && parallel.rank() == 1) {
      definition.build = [factor, build = definition.build] {
        BuiltLayer layer = build();
        layer.forward = [factor,
                         forward = layer.forward](const Tensors& inputs) {
          return forward({inputs[0] * factor});
        };
        return layer;
      };
    }
    broken.add_definition(definition);
  }
  return broken;
}

TEST(TensorParallelTraining, AWrongFactorIsFound) {
  const Job job = cut_job({.tp = 2});
  const auto right = result_of(
      job, {.steps = 2},
      [](const TensorParallel& parallel) { return broken_list(parallel, 1); });
  EXPECT_TRUE(right.passed);
  const auto wrong =
      result_of(job, {.steps = 2}, [](const TensorParallel& parallel) {
        return broken_list(parallel, 1 + 1e-6);
      });
  EXPECT_FALSE(wrong.passed);
}

TEST(TensorParallelTraining, AListThatIsNoFunctionCannotBeSharded) {
  const LayerList list = cut_list({});
  EXPECT_THAT(
      error_text<ConfigError>([&] {
        run_ranks(2, [&](World& world) {
          verify(cut_job({.tp = 2}), world, {}, &list);
        });
      }),
      HasSubstr(
          "tp=2: a list of layers of one's own is sharded when it is given"));
  EXPECT_THAT(
      error_text<ConfigError>([&] {
        result_of(
            cut_job({.tp = 2}), {.steps = 2},
            [](const TensorParallel& parallel) {
              auto layers = cut_list(parallel);
              if (parallel.size() > 1)
                layers.add("more", [] { return torch::nn::Tanh(); });
              return layers;
            });
      }),
      HasSubstr("has 5 layers, the full one 4"));
}

// The norm of all gradients, of each layout: what clipping and metrics see.
TEST(TensorParallelTraining, EachGradientCountsOnceInTheNorm) {
  const auto norm_of = [](const Layout& layout) {
    Job job = cut_job(layout);
    job.model.dtype = ModelDtype::float64;
    std::set<double> norms;
    std::mutex mutex;
    const auto body = [&](World&, const MeshGroups&, ParallelModel& model) {
      const torch::NoGradGuard no_grad;
      std::vector<torch::Tensor> tensors;
      for (const auto& part : model.parameters()) {
        part.value.mutable_grad() = torch::ones_like(part.value);
        tensors.push_back(part.value);
      }
      const auto shared = model.partitioned_gradients();
      const double norm = gradient_norm(tensors, shared ? &*shared : nullptr);
      const std::lock_guard lock(mutex);
      norms.insert(norm);
    };
    on_models(job, body, cut_list);
    EXPECT_EQ(norms.size(), 1U) << to_string(layout);
    return *norms.begin();
  };
  const double all = 64 * 13 + 13 + 13 * 7 + 7 + 7 * 11 + 11 + 11 * 10 + 10;
  for (const Layout& layout : parse_layouts(
           {"dp=1", "tp=2", "tp=3", "dp=2,tp=2", "tp=2,pp=2",
            "dp=2,tp=2,pp=2"})) {
    EXPECT_NEAR(norm_of(layout), std::sqrt(all), 1e-9) << to_string(layout);
  }
}

class TensorTraining : public TrainedRuns {
 protected:
  std::filesystem::path run(const Job& job, const std::string& name) {
    return TrainedRuns::run(job, name, cut_list);
  }
};

// Losses, norms, accuracy and the file of weights are those of one device.
TEST_F(TensorTraining, FollowsTheCurveOfOneDeviceAndSavesFullTensors) {
  const auto job_of = [](const Layout& layout) {
    Job job = cut_job(layout);
    job.model.dtype = ModelDtype::float64;
    job.train.steps = 10;
    job.train.log_every = 1;
    return job;
  };
  const auto one = run(job_of({}), "one");
  for (const Layout& layout : parse_layouts({"tp=3", "dp=2,tp=2,pp=2"})) {
    SCOPED_TRACE(to_string(layout));
    expect_same_run(run(job_of(layout), to_string(layout)), one);
  }
}

// Only one rank has the broken part; the others compute each layer with it.
TEST_F(TensorTraining, ANanInOneShardNamesTheLayer) {
  for (const Layout& layout : parse_layouts({"tp=2", "dp=2,tp=2,pp=2"})) {
    Job job = cut_job(layout);
    job.optimizer.clip_norm = 0;
    job.optimizer.name = OptimizerKind::sgd;
    job.optimizer.learning_rate = 1e38;
    job.train.steps = 20;
    EXPECT_THAT(
        error_text<NumericError>([&] { run(job, to_string(layout)); }),
        HasAll("is not a finite number", "in layer "));
  }
  on_models(
      cut_job({.tp = 2}),
      [](World& world, const MeshGroups&, ParallelModel& model) {
        for (const auto& part : model.parameters()) {
          const torch::NoGradGuard no_grad;
          if (part.name == "down.weight" && world.rank() == 1) {
            part.value.fill_(std::numeric_limits<float>::quiet_NaN());
          }
        }
        expect_nan_found(model, "down");
      },
      cut_list);
}

TEST_F(TensorTraining, StartsFromWeightsOfAnyLayout) {
  Job job = cut_job({.dp_replicate = 2, .tp = 2, .pp = 2});
  job.optimizer.learning_rate = 1e-2;
  job.optimizer.clip_norm = 0;
  job.train.steps = 60;
  const auto first = run(job, "first");
  const double trained =
      timeline::read_metrics(first / "metrics.jsonl").steps.back().loss;
  for (const Layout& layout : parse_layouts({"dp=1", "tp=3", "tp=2,pp=2"})) {
    Job again = cut_job(layout);
    again.train.steps = 1;
    again.model.weights = last_weights(first);
    const auto folder = run(again, "again " + to_string(layout));
    const double loss =
        timeline::read_metrics(folder / "metrics.jsonl").steps[0].loss;
    EXPECT_LT(loss, 1.5 * trained) << to_string(layout);
  }
}

TEST_F(TensorTraining, CompressesTheGradientsOfEachShard) {
  for (const auto compress : {Compression::bf16, Compression::powersgd}) {
    Job job = cut_job({.dp_replicate = 2, .tp = 2});
    job.optimizer.learning_rate = 1e-2;
    job.train.steps = 60;
    job.train.compress = compress;
    const auto steps =
        timeline::read_metrics(run(job, to_string(compress)) / "metrics.jsonl")
            .steps;
    EXPECT_LT(steps.back().loss, 0.7 * steps[0].loss) << to_string(compress);
  }
}

TEST_F(TensorTraining, ThePartitionMayBeMeasured) {
  Job job = cut_job({.dp_replicate = 2, .tp = 2, .pp = 2});
  job.model.balance = StageBalance::measured;
  expect_equal_to_one_device(job, cut_list);
}

TEST(ModelsByName, DropoutFollowsTheKeysAlone) {
  run_ranks(2, [](World& world) {
    Job job;
    job.layout.tp = 2;
    job.tensor.sequence_parallel = true;
    job.model.name = "gpt";
    job.model.layers = 1;
    job.model.hidden_size = 12;
    job.model.heads = 3;
    job.model.vocab_size = 17;
    job.model.max_positions = 6;
    job.model.dropout = 0.5;
    job.model.dtype = ModelDtype::float64;
    const SampleSpec text{
        .input_shape = {6},
        .input_dtype = torch::kInt64,
        .target_shape = {6},
        .classes = 17};
    const MeshGroups groups(world, job.layout);
    const ModelSource source = model_source(job, text);
    const auto model = make_parallel_model(job, {source, world, groups});
    Batch batch;
    batch.inputs = torch::arange(24).view({4, 6}) % 17;
    batch.targets = (batch.inputs + 1) % 17;
    batch.global_count = 4;
    const auto loss_of = [&](int64_t key, bool training) {
      batch.more = {torch::full({4}, key, torch::kInt64)};
      return (training ? model->forward_backward(batch, false)
                       : model->evaluate(batch))
          .totals()
          .loss_sum;
    };
    if (world.rank() == 1) {  // counted on the first rank
      for (int i = 0; i < 3; ++i) EXPECT_EQ(loss_of(i % 2 + 1, true), 0);
      for (int i = 0; i < 2; ++i) EXPECT_EQ(loss_of(i + 1, false), 0);
      return;
    }
    const double first = loss_of(1, true);
    EXPECT_NE(loss_of(2, true), first);
    EXPECT_EQ(loss_of(1, true), first);
    const double still = loss_of(1, false);
    EXPECT_NE(still, first);
    EXPECT_EQ(loss_of(2, false), still);
  });
}

TEST(ModelsByName, TextIsForModelsOfText) {
  Job job;
  SampleSpec text{
      .input_shape = {6},
      .input_dtype = torch::kInt64,
      .target_shape = {6},
      .classes = 17};
  EXPECT_THAT(
      error_text<ConfigError>([&] { model_source(job, text); }),
      HasSubstr("name=\"simple_cnn\" tells classes apart, but"));
  job.model.name = "gpt2";
  text.input_dtype = torch::kFloat32;
  EXPECT_THAT(
      error_text<ConfigError>([&] { model_source(job, text); }),
      HasSubstr("name=\"gpt2\" predicts the next token, but"));
}

TEST(DescribeShards, HasTheShardsOfEveryRank) {
  const SampleSpec digits{.input_shape = {1, 8, 8}, .classes = 10};
  const Job job = cut_job({.dp_replicate = 2, .tp = 3});
  const auto cut = describe_shards(job, model_source(job, cut_list, digits));
  EXPECT_EQ(cut.ranks, 3);
  EXPECT_EQ(cut.tokens, 0);
  ASSERT_EQ(cut.layers.size(), 4U);
  EXPECT_EQ(cut.layers[0].name, "up");
  ASSERT_EQ(cut.layers[0].parameters.size(), 2U);
  const auto& weight = cut.layers[0].parameters[0];
  EXPECT_EQ(weight.name, "weight");
  ASSERT_EQ(weight.parts.size(), 3U);
  EXPECT_EQ(weight.parts[1], even_shard({13, 64}, 0, 1, 3));
  EXPECT_EQ(cut.layers[2].parameters[0].parts[2], replicated({11, 7}, 2));
  const Job alone = cut_job({.dp_replicate = 2});
  EXPECT_TRUE(describe_shards(alone, model_source(alone, cut_list, digits))
                  .layers.empty());
}

TEST_F(TensorTraining, SaysWhatEachRankHolds) {
  std::vector<std::string> lines;
  const auto lines_of = [&](const Layout& layout) {
    lines.clear();
    on_models(
        cut_job(layout),
        [&](World& world, const MeshGroups&, ParallelModel& model) {
          if (world.rank() == 0) lines = model.describe();
        },
        cut_list);
    return lines;
  };
  EXPECT_THAT(
      lines_of({.tp = 2}),
      testing::ElementsAre(
          "tensor-parallel rank 0 of 2: 659 of 1,151 parameters, 57 %"));
  EXPECT_THAT(
      lines_of({.tp = 2, .pp = 2})[0],
      HasAll(
          "stage 0 (pipeline rank 0): up, ",
          "on the first of 2 tensor-parallel ranks"));
}

}  // namespace echelon::tensor_training_test
