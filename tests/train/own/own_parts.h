// A program's own model, data and loss, small and in float64, and a training
// loop written by hand for one device.
#pragma once

#include <torch/torch.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "echelon/data/sources/order.h"
#include "echelon/parallel/tensor/linear.h"
#include "echelon/train/trainer.h"

namespace echelon {

// Two numbers to predict and a class; each sample has a weight.
inline constexpr int64_t kInputs = 6;
inline constexpr int64_t kNumbers = 2;
inline constexpr int64_t kClasses = 3;
inline constexpr int64_t kOwnSamples = 50;

inline Sample own_sample(int64_t index) {
  const auto steps = torch::arange(kInputs, torch::kFloat64);
  const double at = static_cast<double>(index);
  const auto input = torch::sin(steps * 0.7 + at * 1.3);
  return {
      .input = input,
      .target = torch::stack({input.sum(), (input * steps).mean()}),
      .more_targets = {
          torch::tensor(index * 7 % kClasses),
          torch::tensor(
              0.25 + static_cast<double>(index % 5), torch::kFloat64)}};
}

inline SampleSpec own_spec() {
  return {
      .input_shape = {kInputs},
      .input_dtype = torch::kFloat64,
      .target_shape = {kNumbers},
      .target_dtype = torch::kFloat64,
      .more_targets = {{{}, torch::kInt64}, {{}, torch::kFloat64}}};
}

class OwnDataset : public Dataset {
 public:
  int64_t size() const override { return kOwnSamples; }
  SampleSpec spec() const override { return own_spec(); }
  Sample sample(int64_t index, const SampleContext&) const override {
    return own_sample(index);
  }
};

/// The same samples, but for those that [data] holdout holds out of
/// OwnDataset, in an order of its own for each epoch.
class OwnStream : public SampleStream {
 public:
  OwnStream(std::vector<int64_t> order, bool tells_position)
      : order_(std::move(order)), tells_position_(tells_position) {}
  std::optional<Sample> next() override {
    if (at_ >= order_.size()) return std::nullopt;
    return own_sample(order_[at_++]);
  }
  std::string position() const override {
    return tells_position_ ? "sample \"" + std::to_string(at_) + "\"" : "";
  }
  void seek(const std::string& position) override {
    at_ = std::stoul(position.substr(8));
    ++seeks;
  }
  inline static int seeks = 0;

 private:
  std::vector<int64_t> order_;
  bool tells_position_;
  size_t at_ = 0;
};

class OwnStreams : public Dataset {
 public:
  /// `fewer`: as many samples are missing at the end of an epoch.
  explicit OwnStreams(bool tells_position = true, int64_t fewer = 0)
      : tells_position_(tells_position), fewer_(fewer) {}
  int64_t size() const override { return kUnknownSize; }
  SampleSpec spec() const override { return own_spec(); }
  bool is_stream() const override { return true; }
  std::unique_ptr<SampleStream>
  open(const SampleContext& context) const override {
    auto order = order_of(context.seed, context.epoch);
    order.resize(order.size() - static_cast<size_t>(fewer_));
    return std::make_unique<OwnStream>(std::move(order), tells_position_);
  }
  /// As the trainer orders OwnDataset.
  static std::vector<int64_t> order_of(uint64_t seed, int64_t epoch) {
    return epoch_order(
        split_samples(kOwnSamples, 0.2, seed).train, seed, epoch, true);
  }

 private:
  bool tells_position_;
  int64_t fewer_;
};

class OwnObjective : public Objective {
 public:
  torch::Tensor loss_sum(
      const Tensors& outputs, const Tensors& targets,
      const BatchRanks&) const override {
    const auto numbers = outputs[0].slice(1, 0, kNumbers);
    const auto squares = (numbers - targets[0]).square().sum(1);
    const auto entropy = torch::nn::functional::cross_entropy(
        outputs[0].slice(1, kNumbers), targets[1],
        torch::nn::functional::CrossEntropyFuncOptions().reduction(
            torch::kNone));
    return (targets[2] * (squares + entropy)).sum();
  }
  std::variant<int64_t, torch::Tensor>
  count(const Tensors& targets) const override {
    return targets[2].sum();
  }
  bool counts_units() const override { return true; }
};

inline Metric absolute_error() {
  return {
      .name = "mae",
      .sums = [](const Tensors& outputs, const Tensors& targets) {
        return (outputs[0].slice(1, 0, kNumbers) - targets[0])
            .abs()
            .sum()
            .reshape({1});
      }};
}

/// In shards for tensor-parallel ranks, with widths that do not divide.
inline LayerList own_model(const TensorParallel& parallel) {
  LayerList layers;
  layers.add(
      "up",
      [=] {
        return std::make_shared<ColumnParallelLinear>(
            LinearShape{.in = kInputs, .out = 13}, parallel, "up");
      },
      [](ColumnParallelLinear& up, torch::Tensor x) {
        return torch::tanh(up.forward(x));
      });
  layers.add(
      "down",
      [=] {
        return std::make_shared<RowParallelLinear>(
            LinearShape{.in = 13, .out = 7}, parallel, "down");
      },
      [](RowParallelLinear& down, torch::Tensor x) { return down.forward(x); });
  layers.add("mid", [] { return torch::nn::Linear(7, 9); });
  layers.add(
      "out", [] { return torch::nn::Linear(9, kNumbers + kClasses); },
      [](auto& out, const torch::Tensor& x) {
        return out.forward(torch::tanh(x));
      });
  return layers;
}

inline Job own_job(const std::string& layout = "dp=1", int64_t steps = 9) {
  Job job;
  job.layout = parse_layout(layout);
  job.model.dtype = ModelDtype::float64;
  job.train.batch = 12;
  job.train.steps = steps;
  job.train.seed = 3;
  job.optimizer.name = OptimizerKind::sgd;
  job.optimizer.momentum = 0.9;
  job.optimizer.learning_rate = 0.02;
  job.optimizer.weight_decay = 0;
  job.data.holdout = 0.2;
  if (job.layout.pp > 1) job.pipeline.microbatches = 3;
  return job;
}

inline OwnParts own_parts() {
  return {
      .layers = own_model,
      .dataset = std::make_shared<OwnDataset>(),
      .objective = std::make_shared<OwnObjective>(),
      .metrics = {absolute_error()}};
}

}  // namespace echelon
