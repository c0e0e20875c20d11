#include "echelon/train/strategies/objective.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <cmath>
#include <map>
#include <mutex>

#include "echelon/comm/mesh_groups.h"
#include "echelon/layers/channels_last.h"
#include "echelon/train/strategies/parallel_model.h"
#include "tests/support/error_text.h"
#include "tests/support/parity.h"

namespace echelon::objective_test {

using testing::HasSubstr;
using torch::Tensor;

constexpr int64_t kWords = 11;
constexpr int64_t kSequence = 5;

SampleSpec text_spec() {
  return {
      .input_shape = {kSequence},
      .input_dtype = torch::kInt64,
      .target_shape = {kSequence},
      .classes = kWords};
}

// Six texts; of text i the first i tokens have no target, and the last has none
// at all.
Batch texts() {
  Batch batch;
  batch.inputs = torch::arange(6 * kSequence).view({6, kSequence}) * 7 % kWords;
  batch.targets = (batch.inputs + 3) % kWords;
  for (int64_t text = 0; text < 6; ++text) {
    batch.targets[text].narrow(0, 0, text).fill_(text % 2 == 0 ? -100 : -1);
  }
  batch.global_count = 6;
  return batch;
}

TrainingObjective on_one_rank(
    const std::shared_ptr<const Objective>& objective, bool text = false) {
  return {objective, text, {}, Group::alone("data")};
}

TEST(Classification, CountsSamples) {
  const auto objective = on_one_rank(classification(3));
  const auto scores = torch::tensor({{2.0, 1.0, 0.0}, {0.0, 1.0, 2.0}});
  const auto targets = torch::tensor({0, 1});
  EXPECT_FALSE(objective.counts_tokens());
  EXPECT_EQ(std::get<int64_t>(objective.count({targets})), 2);
  EXPECT_EQ(objective.count_whole({.global_count = 40}), 40);
  EXPECT_EQ(
      classification(3)->count_correct({scores}, {targets}).item<int64_t>(), 1);
  const double log_sum = std::log(1 + std::exp(1.0) + std::exp(2.0));
  EXPECT_NEAR(
      objective.loss_sum({scores}, {targets}).item<double>(),
      (log_sum - 2) + (log_sum - 1), 1e-6);
  EXPECT_THAT(
      error_text<ConfigError>([&] {
        objective.loss_sum({scores, targets}, {targets});
      }),
      HasSubstr("returns float32 [2, 3] and int64 [2]"));
}

TEST(Classification, EachClassHasAScore) {
  const auto targets = torch::tensor({0, 1});
  EXPECT_EQ(
      error_text<ConfigError>([&] {
        on_one_rank(classification(3))
            .loss_sum({torch::rand({2, 1})}, {targets});
      }),
      "the model's last layer returns float32 [2, 1], and there are 3 classes; "
      "let it return a score for each, as [samples, 3], or set [model] "
      "classes");
}

// A sum of many losses, which stagnates at 256 in bf16 and ends at 65504 in
// fp16.
TEST(Classification, LossesOfLowPrecisionAreSummedInFloat32) {
  constexpr int64_t kSamples = 60000;
  const auto targets = torch::arange(kSamples).remainder(10);
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    const auto scores =
        parity::random({kSamples, 10}, 1).to(dtype).requires_grad_();
    const auto exact = scores.detach().to(torch::kFloat64).requires_grad_();
    const auto objective = on_one_rank(classification(10));
    const auto loss = objective.loss_sum({scores}, {targets});
    const auto expected = objective.loss_sum({exact}, {targets});
    EXPECT_EQ(loss.scalar_type(), torch::kFloat32);
    EXPECT_NEAR(loss.item<double>() / expected.item<double>(), 1.0, 1e-6);
    loss.backward();
    expected.backward();
    EXPECT_EQ(scores.grad().scalar_type(), dtype);
    EXPECT_LT(
        (scores.grad() - exact.grad()).abs().max().item<double>(), 0x1p-8);
  }
}

TEST(NextToken, CountsTokensThatHaveATarget) {
  const auto objective = on_one_rank(next_token(kWords, {}), true);
  const Batch batch = texts();
  EXPECT_TRUE(objective.counts_tokens());
  EXPECT_EQ(
      std::get<Tensor>(objective.count({batch.targets})).item<int64_t>(), 15);
  EXPECT_EQ(
      std::get<int64_t>(next_token(kWords, {}, true)->count({batch.targets})),
      batch.targets.numel());
  const auto scores = parity::random({6, kSequence, kWords}, 1);
  const auto losses = -torch::log_softmax(scores, -1);
  double expected = 0;
  int64_t correct = 0;
  for (int64_t i = 0; i < 6; ++i) {
    for (int64_t j = 0; j < kSequence; ++j) {
      const auto target = batch.targets[i][j].item<int64_t>();
      if (target < 0) continue;
      expected += losses[i][j][target].item<double>();
      correct += scores[i][j].argmax().item<int64_t>() == target ? 1 : 0;
    }
  }
  const auto sum = objective.loss_sum({scores}, {batch.targets});
  EXPECT_NEAR(sum.item<double>(), expected, 1e-12);
  Score some;
  objective.evaluate(some, {scores}, {batch.targets});
  const Score::Totals score = some.totals();
  EXPECT_NEAR(score.loss_sum, expected, 1e-12);
  EXPECT_EQ(score.count, 15);
  EXPECT_EQ(score.samples, 6);
  EXPECT_EQ(score.correct, correct);
}

TEST(NextToken, TokensStayIntegers) {
  const auto text = on_one_rank(next_token(kWords, {}), true);
  Batch batch = texts();
  batch.inputs = batch.inputs.to(torch::kInt32);
  batch.more = {torch::arange(6)};
  const Batch ready = text.prepared(batch, torch::kCPU, torch::kFloat32);
  EXPECT_EQ(ready.inputs.scalar_type(), torch::kInt64);
  EXPECT_EQ(inputs_of(ready).size(), 2U);
  EXPECT_TRUE(inputs_of(piece_of(ready, 2, 3))[1].equal(torch::arange(2, 5)));
  // Pixels are numbers, of whatever type the file has them.
  batch.inputs = torch::ones({6, 1, 2, 2}, torch::kUInt8);
  EXPECT_EQ(
      on_one_rank(classification(10))
          .prepared(batch, torch::kCPU, torch::kFloat64)
          .inputs.scalar_type(),
      torch::kFloat64);
}

// As for a GPU in 16 bits. Of one channel the strides tell the order.
TEST(Classification, BringsImagesInTheOrderOfConvolutions) {
  const auto objective = on_one_rank(classification(10));
  for (const int64_t channels : {1, 3}) {
    Batch batch;
    batch.inputs = torch::arange(6 * channels * 20).view({6, channels, 4, 5});
    batch.targets = torch::zeros({6}, torch::kInt64);
    const auto prepared = [&] {
      return objective.prepared(batch, torch::kCPU, torch::kFloat32).inputs;
    };
    EXPECT_TRUE(prepared().is_contiguous());
    EXPECT_EQ(prepared().stride(1), 20);
    const ChannelsLastEverywhere everywhere;
    const auto images = prepared();
    EXPECT_EQ(images.stride(1), 1);
    EXPECT_EQ(
        images.suggest_memory_format(), torch::MemoryFormat::ChannelsLast);
    EXPECT_EQ(images.scalar_type(), torch::kFloat32);
    EXPECT_TRUE(images.equal(batch.inputs.to(torch::kFloat32)));
    batch.inputs = batch.inputs.flatten(1);
    EXPECT_EQ(prepared().stride(0), channels * 20);
  }
}

TEST(Classification, KnowsImagesByTheirThreeDimensions) {
  SampleSpec spec{.input_shape = {3, 8, 8}};
  EXPECT_TRUE(is_image(spec));
  spec.input_dtype = torch::kInt64;
  EXPECT_FALSE(is_image(spec));
  EXPECT_FALSE(is_image({.input_shape = {8, 8}}));
  EXPECT_FALSE(is_image(text_spec()));
}

TEST(NextToken, IsWhatTextIsFor) {
  SampleSpec spec = text_spec();
  EXPECT_TRUE(is_text(spec));
  EXPECT_TRUE(objective_for(spec, kWords, {})->counts_tokens());
  spec.target_shape = {};
  EXPECT_FALSE(is_text(spec));
  spec = text_spec();
  spec.input_dtype = torch::kFloat32;
  EXPECT_FALSE(objective_for(spec, kWords, {})->counts_tokens());
}

TEST(LossScale, ABatchWithoutTargetsIsAnError) {
  Batch batch = texts();
  batch.targets.fill_(-100);
  const Group alone = Group::alone("dp");
  EXPECT_THAT(
      error_text<DataError>([&] {
        loss_scale(
            on_one_rank(next_token(kWords, {}), true), batch, alone, true);
      }),
      HasSubstr("no token with a target"));
}

LayerList bigrams() {
  LayerList layers;
  layers.add("embed", [] { return torch::nn::Embedding(kWords, 6); });
  layers.add("mix", [] { return torch::nn::Linear(6, 6); });
  layers.add("act", [] { return torch::nn::Tanh(); });
  layers.add("head", [] { return torch::nn::Linear(6, kWords); });
  return layers;
}

struct Result {
  double loss_sum = 0;
  int64_t count = 0;
  std::map<std::string, Tensor> gradients;
};

Result gradients_of(Job job) {
  job.model.dtype = ModelDtype::float64;
  job.train.batch = 6;
  const Batch all = texts();
  Result result;
  std::mutex mutex;
  run_ranks(static_cast<int>(job.layout.num_ranks()), [&](World& world) {
    const MeshGroups groups(world, job.layout);
    const ModelSource source =
        model_source(job, whole_layers(bigrams()), text_spec());
    const auto model = make_parallel_model(job, {source, world, groups});
    const int64_t share = 6 / groups.data().size();
    const Batch own = piece_of(all, groups.data_index() * share, share);
    const auto score =
        model->forward_backward(own, /*count_units=*/true).totals();
    const std::lock_guard lock(mutex);
    result.loss_sum += score.loss_sum;
    result.count += score.count;
    for (const auto& part : model->parameters()) {
      if (groups.data_index() > 0) continue;
      result.gradients[part.name] = part.gradient.clone();
    }
  });
  return result;
}

// The losses of a mixture's router, behind the scores.
TEST(NextToken, EachTargetCountsTheRoutersLossOfItsText) {
  const auto objective = on_one_rank(next_token(kWords, {}), /*text=*/true);
  const Batch batch = texts();
  const auto scores = parity::random({6, kSequence, kWords}, 1);
  const auto losses = parity::random({6}, 2);
  double expected =
      objective.loss_sum({scores}, {batch.targets}).item<double>();
  for (int64_t text = 0; text < 6; ++text) {
    expected +=
        static_cast<double>(kSequence - text) * losses[text].item<double>();
  }
  EXPECT_NEAR(
      objective.loss_sum({scores, losses}, {batch.targets}).item<double>(),
      expected, 1e-12);
}

TEST(NextToken, EveryTokenWeighsTheSameInAnyLayout) {
  Job one;
  const Result expected = gradients_of(one);
  EXPECT_EQ(expected.count, 15);
  // The mean over the tokens, by hand.
  auto network = build_network(bigrams(), 0, 4, one.train.seed);
  to_dtype(*network, torch::kFloat64);
  const Batch all = texts();
  const auto losses = torch::cross_entropy_loss(
      network->forward(all.inputs).flatten(0, 1),
      all.targets.flatten().clamp_min(-1), {}, at::Reduction::None, -1);
  losses.sum().div(15).backward();
  EXPECT_NEAR(expected.loss_sum, losses.sum().item<double>(), 1e-12);
  for (const auto& item : network->named_parameters()) {
    EXPECT_TRUE(item.value().grad().allclose(
        expected.gradients.at(item.key()), 1e-12, 1e-14))
        << item.key();
  }
  for (const auto& layout :
       {Layout{.dp_replicate = 2}, Layout{.dp_replicate = 3}, Layout{.pp = 2},
        Layout{.dp_replicate = 3, .pp = 2}}) {
    for (const int64_t pieces : {1, 2}) {
      Job job;
      job.layout = layout;
      if (layout.pp > 1) {
        job.pipeline.microbatches = pieces;
      } else {
        job.train.accumulate = pieces;
      }
      const Result actual = gradients_of(job);
      EXPECT_NEAR(actual.loss_sum, expected.loss_sum, 1e-12);
      EXPECT_EQ(actual.count, 15);
      parity::expect_same(
          to_string(layout) + ", pieces " + std::to_string(pieces),
          expected.gradients, actual.gradients, parity::kRounding);
    }
  }
}

}  // namespace echelon::objective_test
