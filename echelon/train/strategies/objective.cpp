// A microbatch gives the sum of its units' losses, never a mean, since
// microbatches and ranks may have different numbers of units. The factor ranks
// / units makes a mean of it: data parallelism divides the sum over the ranks
// by their number. Sums and counts stay scalars on the device until totals()
// reads them, so that a step does not wait; only a CPU's are looked at before.
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
  std::variant<int64_t, torch::Tensor>
  count(const torch::Tensor& targets) const override {
    return targets.size(0);
  }
  int64_t count_whole(const Batch& batch) const override {
    return batch.global_count;
  }
  torch::Tensor loss_sum(
      const Tensors& outputs, const torch::Tensor& targets) const override {
    return F::cross_entropy(
        for_sums(scores_of(outputs, 1, classes_)), targets,
        F::CrossEntropyFuncOptions().reduction(torch::kSum));
  }
  torch::Tensor count_correct(
      const Tensors& outputs, const torch::Tensor& targets) const override {
    return only_one(outputs).argmax(1).eq(targets).sum();
  }

 private:
  int64_t classes_;
};

class NextToken : public TrainingObjective {
 public:
  NextToken(
      int64_t vocabulary, TensorParallel parallel, bool every_target_counts)
      : vocabulary_(vocabulary),
        parallel_(std::move(parallel)),
        every_target_counts_(every_target_counts) {}

  bool counts_tokens() const override { return true; }
  Batch prepared(
      const Batch& batch, torch::Device device, torch::Dtype) const override {
    Batch ready = on_device(batch, device, torch::kInt64);
    const auto& context = parallel_.context;
    const bool documents = !ready.more.empty() && ready.more[0].dim() > 1;
    if ((parallel_.splits_tokens() || context.is_used()) && !documents) {
      ready.more.insert(ready.more.begin(), torch::zeros_like(ready.inputs));
    }
    ready.inputs = context.cut(ready.inputs, 1);
    ready.targets = context.cut(ready.targets, 1);
    return ready;
  }
  std::variant<int64_t, torch::Tensor>
  count(const torch::Tensor& targets) const override {
    if (every_target_counts_) return targets.numel();
    return targets.ge(0).sum();
  }
  int64_t count_whole(const Batch& batch) const override {
    const auto& whole =
        parallel_.context.is_used() ? batch.more.at(0) : batch.targets;
    return batch.global_count * c10::multiply_integers(whole.sizes().slice(1));
  }
  int64_t count_samples(const torch::Tensor& targets) const override {
    return parallel_.context.rank() == 0 ? targets.size(0) : 0;
  }
  torch::Tensor loss_sum(
      const Tensors& outputs, const torch::Tensor& targets) const override {
    const bool with_losses = has_losses(outputs, targets);
    const Tensors first = {outputs[0]};
    const auto& all = with_losses ? first : outputs;
    const auto& scores =
        parallel_.size() == 1 ? scores_of(all, -1, vocabulary_) : only_one(all);
    // Data sets mark ignored targets by different negative numbers, and the
    // loss knows one.
    const auto sum = vocab_cross_entropy(
                         scores, targets.clamp_min(kIgnored), vocabulary_,
                         holder_of(scores), kIgnored)
                         .sum();
    if (!with_losses) return sum;
    // Each unit counts the losses of its sample.
    const auto units = targets.ge(0).sum(1).to(outputs[1].scalar_type());
    return sum + (outputs[1] * units).sum();
  }
  torch::Tensor count_correct(
      const Tensors& outputs, const torch::Tensor& targets) const override {
    const auto& scores = only_one(outputs);
    return vocab_argmax(scores, vocabulary_, holder_of(scores))
        .eq(targets)
        .sum();
  }

 private:
  static constexpr int64_t kIgnored = -1;

  // Whether the outputs are scores and the losses of each sample.
  static bool has_losses(const Tensors& outputs, const torch::Tensor& targets) {
    return outputs.size() == 2 && outputs[1].is_floating_point() &&
           outputs[1].dim() == 1 && outputs[1].size(0) == targets.size(0);
  }

  // The group that shards these scores: this rank alone if it has all.
  TensorParallel holder_of(const torch::Tensor& scores) const {
    return scores.size(-1) == vocabulary_ ? TensorParallel{} : parallel_;
  }

  int64_t vocabulary_;
  TensorParallel parallel_;
  bool every_target_counts_;
};

void append(
    std::vector<torch::Tensor>& to, const std::vector<torch::Tensor>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

torch::Tensor sum_of(const std::vector<torch::Tensor>& scalars) {
  return scalars.size() == 1 ? scalars[0]
                             : at::stack(scalars).sum(torch::kFloat64);
}

}  // namespace

Score& Score::operator+=(const Score& other) {
  append(losses, other.losses);
  append(counts, other.counts);
  append(corrects, other.corrects);
  count += other.count;
  samples += other.samples;
  return *this;
}

torch::Tensor Score::sums(torch::Device device) const {
  const torch::NoGradGuard no_grad;
  // A kernel's argument fills a tensor without a copy from the host.
  auto sums = torch::zeros({4}, torch::dtype(torch::kFloat64).device(device));
  if (!losses.empty()) sums[0].copy_(sum_of(losses), /*non_blocking=*/true);
  if (!counts.empty()) sums[1].copy_(sum_of(counts), /*non_blocking=*/true);
  if (!corrects.empty()) {
    sums[2].copy_(sum_of(corrects), /*non_blocking=*/true);
  }
  sums[1].add_(count);
  sums[3].fill_(samples);
  return sums;
}

Score::Totals Score::totals() const {
  const auto sum = [](const std::vector<torch::Tensor>& scalars) {
    return scalars.empty() ? 0 : sum_of(scalars).item<double>();
  };
  return {
      .loss_sum = sum(losses),
      .count = count + static_cast<int64_t>(sum(counts)),
      .correct = static_cast<int64_t>(sum(corrects)),
      .samples = samples};
}

LossFactor LossFactor::times(const torch::Tensor& factor) const {
  if (!factor.defined()) return *this;
  return {number, on_device.defined() ? on_device * factor : factor};
}

torch::Tensor LossFactor::operator*(const torch::Tensor& loss) const {
  const auto scaled = loss * number;
  if (!on_device.defined()) return scaled;
  return scaled *
         on_device.to(loss.device(), loss.scalar_type(), /*non_blocking=*/true);
}

void TrainingObjective::add_loss(
    Score& score, const torch::Tensor& loss_sum,
    const torch::Tensor& targets) const {
  const auto units = count(targets);
  score.losses.push_back(loss_sum.detach());
  score.samples += count_samples(targets);
  if (const auto* known = std::get_if<int64_t>(&units)) {
    score.count += *known;
  } else {
    score.counts.push_back(std::get<torch::Tensor>(units));
  }
}

void TrainingObjective::evaluate(
    Score& score, const Tensors& outputs, const torch::Tensor& targets) const {
  const torch::NoGradGuard no_grad;
  add_loss(score, loss_sum(outputs, targets), targets);
  score.corrects.push_back(count_correct(outputs, targets));
}

std::unique_ptr<TrainingObjective> classification(int64_t classes) {
  return std::make_unique<Classification>(classes);
}

std::unique_ptr<TrainingObjective> next_token(
    int64_t vocabulary, const TensorParallel& parallel,
    bool every_target_counts) {
  return std::make_unique<NextToken>(vocabulary, parallel, every_target_counts);
}

bool is_text(const SampleSpec& spec) {
  return c10::isIntegralType(spec.input_dtype, /*includeBool=*/false) &&
         spec.input_shape.size() == 1 && spec.target_shape == spec.input_shape;
}

std::unique_ptr<TrainingObjective> objective_for(
    const SampleSpec& spec, int64_t classes, const TensorParallel& parallel) {
  return is_text(spec) ? next_token(classes, parallel, spec.every_target_counts)
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

LossFactor loss_scale(
    const TrainingObjective& objective, const Batch& batch, const Group& data,
    bool count_units) {
  const auto ranks = static_cast<double>(data.size());
  int64_t units = 0;
  if (!count_units) {
    units = objective.count_whole(batch);
  } else {
    const auto own = objective.count(batch.targets);
    const auto* known = std::get_if<int64_t>(&own);
    auto total =
        known ? torch::full(
                    {1}, *known, batch.targets.options().dtype(torch::kInt64))
              : std::get<torch::Tensor>(own).reshape({1}).clone();
    data.all_reduce(total, ReduceOp::sum, {.label = "batch size"}).wait();
    if (!total.is_cpu()) {
      const auto some = total.to(torch::kFloat64).clamp_min(1);
      return {.on_device = some.reciprocal().mul_(ranks).squeeze(0)};
    }
    units = total.item<int64_t>();
  }
  if (units < 1) throw DataError(no_units(objective.counts_tokens()));
  return {.number = ranks / static_cast<double>(units)};
}

std::string no_units(bool counts_tokens) {
  return counts_tokens ? "a global batch has no token with a target at all; "
                         "raise [train] batch or [data] sequence"
                       : "a global batch has no sample at all";
}

}  // namespace echelon
