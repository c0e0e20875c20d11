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

#include <cstdio>
#include <numeric>
#include <string>
#include <utility>

#include "echelon/comm/differentiable.h"
#include "echelon/error.h"
#include "echelon/layers/channels_last.h"
#include "echelon/layers/low_precision.h"
#include "echelon/layout/shard.h"
#include "echelon/parallel/tensor/vocab.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

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

constexpr bool kNonBlocking = true;

// A copy between the host and a device that also changes the dtype changes it
// on the host, which waits. So devices get the numbers as they are, and round
// them, and bring images in the order that convolutions want, in one pass.
torch::Tensor inputs_on_device(
    const torch::Tensor& inputs, torch::Device device, torch::Dtype dtype) {
  const auto there = inputs.to(device, kNonBlocking);
  if (!prefers_channels_last(inputs.dim(), dtype, device.type())) {
    return there.to(dtype);
  }
  return with_channels_last(there.to(
      dtype, /*non_blocking=*/false, /*copy=*/false,
      at::MemoryFormat::ChannelsLast));
}

Batch on_device(const Batch& batch, torch::Device device, torch::Dtype dtype) {
  Batch ready = batch;
  ready.inputs = inputs_on_device(batch.inputs, device, dtype);
  ready.targets = batch.targets.to(device, kNonBlocking);
  for (auto& tensor : ready.more) {
    tensor = tensor.is_floating_point() ? tensor.to(device, dtype, kNonBlocking)
                                        : tensor.to(device, kNonBlocking);
  }
  for (auto& tensor : ready.more_targets) {
    tensor = tensor.to(device, kNonBlocking);
  }
  return ready;
}

class Classification : public Objective {
 public:
  explicit Classification(int64_t classes) : classes_(classes) {}

  torch::Tensor loss_sum(
      const Tensors& outputs, const Tensors& targets,
      const BatchRanks&) const override {
    return F::cross_entropy(
        for_sums(scores_of(outputs, 1, classes_)), targets[0],
        F::CrossEntropyFuncOptions().reduction(torch::kSum));
  }
  torch::Tensor
  count_correct(const Tensors& outputs, const Tensors& targets) const override {
    return only_one(outputs).argmax(1).eq(targets[0]).sum();
  }

 private:
  int64_t classes_;
};

class NextToken : public Objective {
 public:
  NextToken(
      int64_t vocabulary, TensorParallel parallel, bool every_target_counts)
      : vocabulary_(vocabulary),
        parallel_(std::move(parallel)),
        every_target_counts_(every_target_counts) {}

  bool counts_tokens() const override { return true; }
  bool counts_units() const override { return !every_target_counts_; }
  std::variant<int64_t, torch::Tensor>
  count(const Tensors& targets) const override {
    if (every_target_counts_) return targets[0].numel();
    return targets[0].ge(0).sum();
  }
  torch::Tensor loss_sum(
      const Tensors& outputs, const Tensors& all_targets,
      const BatchRanks&) const override {
    const torch::Tensor& targets = all_targets[0];
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
    // Each unit counts the losses of its sample, those on other ranks too.
    const auto units = targets.ge(0).sum(1);
    const auto& context = parallel_.context.group;
    context.all_reduce(units, ReduceOp::sum, {.label = "targets of samples"})
        .wait();
    return sum + (outputs[1] * units).sum();
  }
  torch::Tensor
  count_correct(const Tensors& outputs, const Tensors& targets) const override {
    const auto& scores = only_one(outputs);
    return vocab_argmax(scores, vocabulary_, holder_of(scores))
        .eq(targets[0])
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

class WithWholeScores : public Objective {
 public:
  WithWholeScores(
      std::shared_ptr<const Objective> objective, int64_t vocabulary,
      TensorParallel parallel)
      : objective_(std::move(objective)),
        vocabulary_(vocabulary),
        parallel_(std::move(parallel)) {}

  torch::Tensor loss_sum(
      const Tensors& outputs, const Tensors& targets,
      const BatchRanks& ranks) const override {
    return objective_->loss_sum(whole(outputs), targets, ranks);
  }
  std::variant<int64_t, torch::Tensor>
  count(const Tensors& targets) const override {
    return objective_->count(targets);
  }
  bool counts_units() const override { return objective_->counts_units(); }
  bool counts_tokens() const override { return objective_->counts_tokens(); }
  bool needs_whole_batch() const override {
    return objective_->needs_whole_batch();
  }
  torch::Tensor
  count_correct(const Tensors& outputs, const Tensors& targets) const override {
    return objective_->count_correct(whole(outputs), targets);
  }

 private:
  Tensors whole(const Tensors& outputs) const {
    return whole_scores(outputs, vocabulary_, parallel_);
  }

  std::shared_ptr<const Objective> objective_;
  int64_t vocabulary_;
  TensorParallel parallel_;
};

// The loss of a program's own objective.
torch::Tensor checked_loss(const torch::Tensor& loss) {
  if (loss.defined() && loss.dim() == 0 && loss.is_floating_point()) {
    return for_sums(loss);
  }
  throw ConfigError(format(
      "the objective's loss_sum() returns {}; let it return a floating-point "
      "scalar, the sum over the samples that it was given",
      loss.defined() ? describe({loss}) : "an undefined tensor"));
}

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
  if (other.metrics.defined()) {
    metrics = metrics.defined() ? metrics + other.metrics : other.metrics;
  }
  return *this;
}

torch::Tensor Score::sums(torch::Device device, int64_t metric_numbers) const {
  const torch::NoGradGuard no_grad;
  // A kernel's argument fills a tensor without a copy from the host.
  auto sums = torch::zeros(
      {kNumbers + metric_numbers},
      torch::dtype(torch::kFloat64).device(device));
  if (!losses.empty()) sums[0].copy_(sum_of(losses), /*non_blocking=*/true);
  if (!counts.empty()) sums[1].copy_(sum_of(counts), /*non_blocking=*/true);
  if (!corrects.empty()) {
    sums[2].copy_(sum_of(corrects), /*non_blocking=*/true);
  }
  sums[1].add_(count);
  sums[3].fill_(samples);
  sums[4].fill_(corrects.empty() ? 0 : 1);
  if (metrics.defined()) {
    sums.narrow(0, kNumbers, metric_numbers).copy_(metrics);
  }
  return sums;
}

Score::Totals Score::totals() const {
  const auto sum = [](const std::vector<torch::Tensor>& scalars) {
    return scalars.empty() ? 0 : sum_of(scalars).item<double>();
  };
  return {
      .loss_sum = sum(losses),
      .count = static_cast<double>(count) + sum(counts),
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

BatchRanks::Gathered BatchRanks::gather(const torch::Tensor& rows) const {
  if (data_.size() == 1) return {rows, 0};
  const auto own = torch::full(
      {1}, rows.size(0), torch::dtype(torch::kInt64).device(rows.device()));
  auto all = torch::empty({data_.size()}, own.options());
  data_.all_gather(all, own, {.label = "rows of the batch"}).wait();
  const auto counts = all.cpu();
  const auto* count = counts.const_data_ptr<int64_t>();
  const std::vector<int64_t> sizes(count, count + data_.size());
  const auto before =
      std::accumulate(sizes.begin(), sizes.begin() + data_.rank(), int64_t{0});
  return {all_gather(rows, data_, 0, sizes, "rows of the batch"), before};
}

TrainingObjective::TrainingObjective(
    std::shared_ptr<const Objective> objective, bool text,
    TensorParallel parallel, const Group& data, std::vector<Metric> metrics,
    int64_t vocabulary)
    : objective_(std::move(objective)),
      text_(text),
      parallel_(std::move(parallel)),
      ranks_(data),
      metrics_(std::move(metrics)),
      vocabulary_(vocabulary) {}

Batch TrainingObjective::prepared(
    const Batch& batch, torch::Device device, torch::Dtype dtype) const {
  if (!text_) {
    return on_device(
        batch, device, batch.ids ? batch.inputs.scalar_type() : dtype);
  }
  Batch ready = on_device(batch, device, torch::kInt64);
  const auto& context = parallel_.context;
  const bool documents = !ready.more.empty() && ready.more[0].dim() > 1;
  if ((parallel_.splits_tokens() || context.is_used()) && !documents) {
    ready.more.insert(ready.more.begin(), torch::zeros_like(ready.inputs));
  }
  const int64_t sequence = ready.inputs.size(1);
  ready.inputs = context.cut(ready.inputs, 1);
  ready.targets = context.cut(ready.targets, 1);
  for (auto& tensor : ready.more_targets) {
    if (tensor.dim() > 1 && tensor.size(1) == sequence) {
      tensor = context.cut(tensor, 1);
    }
  }
  return ready;
}

std::variant<int64_t, torch::Tensor>
TrainingObjective::count(const Tensors& targets) const {
  if (only_has_tokens() && !counts_tokens()) return int64_t{0};
  return objective_->count(targets);
}

int64_t TrainingObjective::count_whole(const Batch& batch) const {
  if (!counts_tokens()) return batch.global_count;
  const auto& whole =
      parallel_.context.is_used() ? batch.more.at(0) : batch.targets;
  return batch.global_count * c10::multiply_integers(whole.sizes().slice(1));
}

torch::Tensor TrainingObjective::loss_sum(
    const Tensors& outputs, const Tensors& targets) const {
  return checked_loss(objective_->loss_sum(outputs, targets, ranks_));
}

void TrainingObjective::add_loss(
    Score& score, const torch::Tensor& loss_sum, const Tensors& targets) const {
  const auto units = count(targets);
  score.losses.push_back(loss_sum.detach());
  score.samples += only_has_tokens() ? 0 : targets.at(0).size(0);
  if (const auto* known = std::get_if<int64_t>(&units)) {
    score.count += *known;
  } else {
    score.counts.push_back(std::get<torch::Tensor>(units).detach());
  }
}

void TrainingObjective::evaluate(
    Score& score, const Tensors& outputs, const Tensors& targets) const {
  const torch::NoGradGuard no_grad;
  add_loss(score, loss_sum(outputs, targets), targets);
  if (const auto right = objective_->count_correct(outputs, targets);
      right.defined()) {
    score.corrects.push_back(right);
  }
  if (!metrics_.empty()) {
    score += Score{.metrics = measure(outputs, targets)};
  }
}

void TrainingObjective::evaluate_none(
    Score& score, const Tensors& outputs, const Tensors& targets) const {
  const torch::NoGradGuard no_grad;
  const auto none = [](const Tensors& some) {
    Tensors empty;
    for (const auto& one : some) empty.push_back(one.narrow(0, 0, 0));
    return empty;
  };
  add_loss(score, loss_sum(none(outputs), none(targets)), none(targets));
}

torch::Tensor TrainingObjective::measure(
    const Tensors& shards, const Tensors& targets) const {
  const Tensors outputs = whole_scores(shards, vocabulary_, parallel_);
  std::vector<torch::Tensor> parts;
  const auto numbers = torch::dtype(torch::kFloat64).device(torch::kCPU);
  for (const auto& metric : metrics_) {
    std::string failure;
    torch::Tensor sums;
    try {
      sums = metric.sums(outputs, targets)
                 .detach()
                 .to(torch::kCPU, torch::kFloat64)
                 .flatten();
      if (sums.numel() != metric.numbers) {
        failure = format(
            "its sums are {}, and it says numbers = {}",
            counted(sums.numel(), "number"), metric.numbers);
      }
    } catch (const std::exception& error) {
      failure = detail::first_line(error);
    }
    if (!failure.empty()) {
      std::fprintf(
          stderr,
          "warning: metric \"%s\" has no value in this evaluation: %s\n",
          metric.name.c_str(), failure.c_str());
      sums = torch::zeros({metric.numbers}, numbers);
    }
    parts.push_back(sums);
    parts.push_back(torch::full({1}, failure.empty() ? 0.0 : 1.0, numbers));
  }
  return at::cat(parts);
}

Tensors whole_scores(
    const Tensors& outputs, int64_t vocabulary,
    const TensorParallel& parallel) {
  const bool sharded = vocabulary > 0 && parallel.size() > 1 &&
                       outputs.at(0).size(-1) != vocabulary;
  if (!sharded) return outputs;
  std::vector<int64_t> sizes;
  for (int rank = 0; rank < parallel.size(); ++rank) {
    sizes.push_back(even_range(vocabulary, rank, parallel.size()).size());
  }
  Tensors whole = outputs;
  whole[0] = gather_from(
      outputs[0].contiguous(), parallel.group, outputs[0].dim() - 1, sizes,
      "scores gather");
  return whole;
}

std::shared_ptr<const Objective> with_whole_scores(
    std::shared_ptr<const Objective> objective, int64_t vocabulary,
    const TensorParallel& parallel) {
  if (vocabulary == 0 || parallel.size() == 1) return objective;
  return std::make_shared<WithWholeScores>(
      std::move(objective), vocabulary, parallel);
}

int64_t metric_numbers(const std::vector<Metric>& metrics) {
  int64_t all = 0;
  for (const auto& metric : metrics) all += metric.numbers + 1;
  return all;
}

std::vector<std::pair<std::string, double>> metric_values(
    const std::vector<Metric>& metrics, const double* sums, int64_t samples) {
  std::vector<std::pair<std::string, double>> values;
  for (const auto& metric : metrics) {
    const std::vector<double> own(sums, sums + metric.numbers);
    const bool failed = sums[metric.numbers] > 0;
    sums += metric.numbers + 1;
    if (failed) continue;
    try {
      values.emplace_back(
          metric.name, metric.value ? metric.value(own, samples)
                                    : own.at(0) / static_cast<double>(samples));
    } catch (const std::exception& error) {
      std::fprintf(
          stderr,
          "warning: metric \"%s\" has no value in this evaluation: %s\n",
          metric.name.c_str(), detail::first_line(error).c_str());
    }
  }
  return values;
}

std::shared_ptr<const Objective> classification(int64_t classes) {
  return std::make_shared<Classification>(classes);
}

std::shared_ptr<const Objective> next_token(
    int64_t vocabulary, const TensorParallel& parallel,
    bool every_target_counts) {
  return std::make_shared<NextToken>(vocabulary, parallel, every_target_counts);
}

bool is_image(const SampleSpec& spec) {
  return spec.input_shape.size() == 3 && c10::isFloatingType(spec.input_dtype);
}

bool is_text(const SampleSpec& spec) {
  return c10::isIntegralType(spec.input_dtype, /*includeBool=*/false) &&
         spec.input_shape.size() == 1 && spec.target_shape == spec.input_shape;
}

std::shared_ptr<const Objective> objective_for(
    const SampleSpec& spec, int64_t classes, const TensorParallel& parallel) {
  return is_text(spec) ? next_token(classes, parallel, spec.every_target_counts)
                       : classification(classes);
}

Tensors inputs_of(const Batch& batch) {
  Tensors inputs = {batch.inputs};
  inputs.insert(inputs.end(), batch.more.begin(), batch.more.end());
  return inputs;
}

Tensors targets_of(const Batch& batch) {
  Tensors targets = {batch.targets};
  targets.insert(
      targets.end(), batch.more_targets.begin(), batch.more_targets.end());
  return targets;
}

Batch piece_of(const Batch& batch, int64_t begin, int64_t length) {
  Batch piece;
  piece.inputs = batch.inputs.narrow(0, begin, length);
  piece.targets = batch.targets.narrow(0, begin, length);
  for (const auto& tensor : batch.more) {
    piece.more.push_back(tensor.narrow(0, begin, length));
  }
  for (const auto& tensor : batch.more_targets) {
    piece.more_targets.push_back(tensor.narrow(0, begin, length));
  }
  piece.ids = batch.ids;
  piece.may_skip = batch.may_skip;
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
  double units = 0;
  if (!count_units) {
    units = static_cast<double>(objective.count_whole(batch));
  } else {
    const auto own = objective.count(targets_of(batch));
    const auto* known = std::get_if<int64_t>(&own);
    auto total =
        known ? torch::full(
                    {1}, *known, batch.targets.options().dtype(torch::kFloat64))
              : std::get<torch::Tensor>(own)
                    .detach()
                    .to(torch::kFloat64)
                    .reshape({1})
                    .clone();
    data.all_reduce(total, ReduceOp::sum, {.label = "batch size"}).wait();
    if (!total.is_cpu()) {
      const auto some = at::where(total > 0, total, torch::ones_like(total));
      return {.on_device = some.reciprocal().mul_(ranks).squeeze(0)};
    }
    units = total.item<double>();
  }
  if (!(units > 0)) throw DataError(no_units(objective.counts_tokens()));
  return {.number = ranks / units};
}

std::string no_units(bool counts_tokens) {
  return counts_tokens ? "a global batch has no token with a target at all; "
                         "raise [train] batch or [data] sequence"
                       : "a global batch has no sample at all";
}

}  // namespace echelon
