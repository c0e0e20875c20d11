#include "echelon/train/strategies/objective.h"

#include <torch/nn/functional.h>
#include <torch/nn/module.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <string>
#include <utility>

#include "echelon/error.h"
#include "echelon/layers/low_precision.h"
#include "echelon/parallel/tensor/vocab.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

namespace F = torch::nn::functional;

const torch::Tensor& only_one(const Tensors& outputs) {
  if (outputs.size() == 1) return outputs[0];
  throw ConfigError(
      "the model's last layer returns " + describe(outputs) +
      "; the loss is taken of one tensor, so let it return the scores alone");
}

// The tensor of scores, which has `classes` of them in this dimension.
const torch::Tensor&
scores_of(const Tensors& outputs, int64_t dimension, int64_t classes) {
  const auto& scores = only_one(outputs);
  if (scores.dim() >= 2 && scores.size(dimension) == classes) return scores;
  throw ConfigError(format(
      "the model's last layer returns {}, and there are {} classes; let it "
      "return a score for each, as {}, or set [model] classes",
      describe(outputs), classes,
      dimension == 1 ? format("[samples, {}]", classes)
                     : format("[samples, tokens, {}]", classes)));
}

Batch on_device(const Batch& batch, torch::Device device, torch::Dtype dtype) {
  constexpr bool kNonBlocking = true;
  Batch ready = batch;
  ready.inputs = batch.inputs.to(device, dtype, kNonBlocking);
  ready.targets = batch.targets.to(device, kNonBlocking);
  for (auto& tensor : ready.more) tensor = tensor.to(device, kNonBlocking);
  return ready;
}

class Classification : public TrainingObjective {
 public:
  explicit Classification(int64_t classes) : classes_(classes) {}

  bool counts_tokens() const override { return false; }
  Batch prepared(const Batch& batch, torch::Device device, torch::Dtype dtype)
      const override {
    return on_device(batch, device, dtype);
  }
  int64_t count(const torch::Tensor& targets) const override {
    return targets.size(0);
  }
  int64_t count_whole(const torch::Tensor&, int64_t samples) const override {
    return samples;
  }
  torch::Tensor loss_sum(
      const Tensors& outputs, const torch::Tensor& targets) const override {
    return F::cross_entropy(
        for_sums(scores_of(outputs, 1, classes_)), targets,
        F::CrossEntropyFuncOptions().reduction(torch::kSum));
  }
  int64_t count_correct(
      const Tensors& outputs, const torch::Tensor& targets) const override {
    return only_one(outputs).argmax(1).eq(targets).sum().item<int64_t>();
  }

 private:
  int64_t classes_;
};

class NextToken : public TrainingObjective {
 public:
  NextToken(int64_t vocabulary, TensorParallel parallel)
      : vocabulary_(vocabulary), parallel_(std::move(parallel)) {}

  bool counts_tokens() const override { return true; }
  Batch prepared(
      const Batch& batch, torch::Device device, torch::Dtype) const override {
    Batch ready = on_device(batch, device, torch::kInt64);
    const bool documents = !ready.more.empty() && ready.more[0].dim() > 1;
    if (parallel_.splits_tokens() && !documents) {
      ready.more.insert(ready.more.begin(), torch::zeros_like(ready.inputs));
    }
    return ready;
  }
  int64_t count(const torch::Tensor& targets) const override {
    return targets.ge(0).sum().item<int64_t>();
  }
  int64_t
  count_whole(const torch::Tensor& targets, int64_t samples) const override {
    return samples * c10::multiply_integers(targets.sizes().slice(1));
  }
  torch::Tensor loss_sum(
      const Tensors& outputs, const torch::Tensor& targets) const override {
    const auto& scores = parallel_.size() == 1
                             ? scores_of(outputs, -1, vocabulary_)
                             : only_one(outputs);
    return vocab_cross_entropy(
               scores, targets.clamp_min(kIgnored), vocabulary_,
               holder_of(scores), kIgnored)
        .sum();
  }
  int64_t count_correct(
      const Tensors& outputs, const torch::Tensor& targets) const override {
    const auto& scores = only_one(outputs);
    return vocab_argmax(scores, vocabulary_, holder_of(scores))
        .eq(targets)
        .sum()
        .item<int64_t>();
  }

 private:
  static constexpr int64_t kIgnored = -1;

  // The group that shards these scores: this rank alone if it has all.
  TensorParallel holder_of(const torch::Tensor& scores) const {
    return scores.size(-1) == vocabulary_ ? TensorParallel{} : parallel_;
  }

  int64_t vocabulary_;
  TensorParallel parallel_;
};

}  // namespace

Score& Score::operator+=(const Score& other) {
  loss_sum += other.loss_sum;
  count += other.count;
  correct += other.correct;
  samples += other.samples;
  return *this;
}

void TrainingObjective::add_loss(
    Score& score, const torch::Tensor& loss_sum,
    const torch::Tensor& targets) const {
  score +=
      {.loss_sum = loss_sum.item<double>(),
       .count = count(targets),
       .samples = targets.size(0)};
}

void TrainingObjective::evaluate(
    Score& score, const Tensors& outputs, const torch::Tensor& targets) const {
  const torch::NoGradGuard no_grad;
  add_loss(score, loss_sum(outputs, targets), targets);
  score.correct += count_correct(outputs, targets);
}

std::unique_ptr<TrainingObjective> classification(int64_t classes) {
  return std::make_unique<Classification>(classes);
}

std::unique_ptr<TrainingObjective>
next_token(int64_t vocabulary, const TensorParallel& parallel) {
  return std::make_unique<NextToken>(vocabulary, parallel);
}

bool is_text(const SampleSpec& spec) {
  return c10::isIntegralType(spec.input_dtype, /*includeBool=*/false) &&
         spec.input_shape.size() == 1 && spec.target_shape == spec.input_shape;
}

std::unique_ptr<TrainingObjective> objective_for(
    const SampleSpec& spec, int64_t classes, const TensorParallel& parallel) {
  return is_text(spec) ? next_token(classes, parallel)
                       : classification(classes);
}

Tensors inputs_of(const Batch& batch) {
  Tensors inputs = {batch.inputs};
  inputs.insert(inputs.end(), batch.more.begin(), batch.more.end());
  return inputs;
}

Batch piece_of(const Batch& batch, int64_t begin, int64_t length) {
  Batch piece;
  piece.inputs = batch.inputs.narrow(0, begin, length);
  piece.targets = batch.targets.narrow(0, begin, length);
  for (const auto& tensor : batch.more) {
    piece.more.push_back(tensor.narrow(0, begin, length));
  }
  piece.global_count = batch.global_count;
  return piece;
}

std::vector<Batch> split_batch(const Batch& batch, int64_t count) {
  const int64_t samples = batch.inputs.size(0);
  std::vector<Batch> pieces;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = samples * i / count;
    pieces.push_back(piece_of(batch, begin, samples * (i + 1) / count - begin));
  }
  return pieces;
}

double loss_scale(
    const TrainingObjective& objective, const Batch& batch, const Group& data,
    bool count_units) {
  int64_t units = 0;
  if (!count_units) {
    units = objective.count_whole(batch.targets, batch.global_count);
  } else {
    auto total = torch::tensor({objective.count(batch.targets)}, torch::kInt64);
    total = total.to(batch.targets.device());
    data.all_reduce(total, ReduceOp::sum, {.label = "batch size"}).wait();
    units = total.item<int64_t>();
  }
  if (units < 1) {
    throw DataError(
        objective.counts_tokens()
            ? "a global batch has no token with a target at all"
            : "a global batch has no sample at all");
  }
  return static_cast<double>(data.size()) / static_cast<double>(units);
}

}  // namespace echelon
