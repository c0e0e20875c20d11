// What a model is trained for: the loss, the units that it is a mean over, and
// which answers are right. Two objectives come with Echelon, and a program may
// bring one of its own.
//
//   classification   a sample has one answer (or one per pixel); units: samples
//   next token       a sample is a text, and the answer at each position that
//                    is not ignored is the next token; units: tokens
//
// The loss of a step is the sum over all units of the global batch, divided by
// their number, whatever the layout.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "echelon/comm/group.h"
#include "echelon/data/dataset.h"
#include "echelon/layers/layer_list.h"
#include "echelon/parallel/tensor/tensor_parallel.h"

namespace echelon {

/// Sums of losses and right answers over some batches. What the device computes
/// stays there until totals() reads it.
struct Score {
  struct Totals {
    double loss_sum = 0;
    double count = 0;     // units
    int64_t correct = 0;  // of these, in evaluation; not counted in training
    int64_t samples = 0;
  };

  // Scalars to be summed: float32 or float64, any, int64.
  std::vector<torch::Tensor> losses;
  std::vector<torch::Tensor> counts;  // in addition to `count`
  std::vector<torch::Tensor> corrects;
  int64_t count = 0;
  int64_t samples = 0;
  /// float64 [TrainingObjective::metric_numbers()]: of each of the program's
  /// metrics, its sums and then 1 where it failed. Undefined: none.
  torch::Tensor metrics;

  Score& operator+=(const Score& other);
  /// [loss sum, count, correct, samples, 1 if answers are right or wrong,
  /// ...metrics], float64 on `device`. Waits for nothing.
  static constexpr int64_t kNumbers = 5;
  torch::Tensor sums(torch::Device device, int64_t metric_numbers = 0) const;
  /// Waits for the device.
  Totals totals() const;
};

/// The factor of a loss: a number, and one that the device alone knows.
struct LossFactor {
  double number = 1;
  torch::Tensor on_device;  // float64 scalar; undefined: 1

  LossFactor times(const torch::Tensor& factor) const;
  torch::Tensor operator*(const torch::Tensor& loss) const;
};

/// The ranks that have other samples of the batch, for a loss that compares
/// samples with each other.
class BatchRanks {
 public:
  explicit BatchRanks(Group data) : data_(std::move(data)) {}

  struct Gathered {
    torch::Tensor rows;  // [N, ...] in the order of the global batch
    int64_t begin = 0;   // of this rank's own rows in it
  };
  /// `rows` [n, ...] of all ranks, which may have different n, also 0. Every
  /// rank calls it, in the same order, with the same `...`. Gradients flow back
  /// to the ranks that the rows are from (differentiable.h, all_gather): the
  /// sum of the ranks' losses is what is differentiated.
  Gathered gather(const torch::Tensor& rows) const;

  int size() const { return data_.size(); }

 private:
  Group data_;
};

/// A loss. A program's own overrides loss_sum(), and the rest where it is not a
/// mean over samples.
///
/// One object serves all ranks that are threads of a process, so methods are
/// const and safe to use from many threads. All ranks of a tensor-parallel
/// group call each method together and get the same numbers.
///
/// `outputs` is what the model's last layer returns, for the samples of a
/// microbatch or of a part of it; of Echelon's language models with tp > 1, the
/// scores of the whole vocabulary. `targets` is Batch::targets and then
/// Batch::more_targets, on the same device. Weights of samples are a target,
/// and so is anything else that a loss needs of a sample. With cp > 1 both have
/// this rank's tokens.
class Objective {
 public:
  virtual ~Objective() = default;

  /// The sum of the units' losses, a differentiable scalar in float32 or
  /// float64. There may be 0 samples: then it is 0 and depends on the outputs.
  virtual torch::Tensor loss_sum(
      const Tensors& outputs, const Tensors& targets,
      const BatchRanks& ranks) const = 0;

  /// How many units the targets have: the loss that is minimised and reported
  /// is the sum over the global batch divided by their number there. By
  /// default samples. Where samples have weights, a scalar tensor with their
  /// sum, on the targets' device. Override counts_units() too.
  virtual std::variant<int64_t, torch::Tensor>
  count(const Tensors& targets) const {
    return targets.at(0).size(0);
  }
  /// Whether count() is not the number of samples, so that ranks must ask each
  /// other (one small all-reduce in each step).
  virtual bool counts_units() const { return false; }

  /// Whether units are tokens; else they are samples.
  virtual bool counts_tokens() const { return false; }

  /// Whether loss_sum() compares the samples of the global batch with each
  /// other (BatchRanks::gather), as contrastive losses do. Then a step must be
  /// one pass: accumulate = 1, and one microbatch in a pipeline.
  virtual bool needs_whole_batch() const { return false; }

  /// Units whose answer with the highest score is the right one, an int64
  /// scalar; undefined, the default, where no answer is right or wrong.
  virtual torch::Tensor
  count_correct(const Tensors& outputs, const Tensors& targets) const {
    return {};
  }
};

/// What a program measures of the held-out samples, beside the loss: a sum over
/// samples, or what follows from some sums.
struct Metric {
  std::string name;
  /// [numbers] of any dtype and device: sums over the samples of `outputs`.
  /// They are added, in float64, over all batches and ranks.
  std::function<torch::Tensor(const Tensors& outputs, const Tensors& targets)>
      sums;
  int64_t numbers = 1;
  /// The metric, from the sums over all held-out samples. None: the first sum
  /// divided by the number of samples.
  std::function<double(const std::vector<double>& sums, int64_t samples)>
      value = nullptr;
};

/// An objective as a rank uses it. All ranks of a tensor-parallel group call
/// each method together and get the same numbers. Ranks of a context-parallel
/// group have numbers of their own tokens; the first of them counts the
/// samples.
class TrainingObjective {
 public:
  ///   data     the data-parallel group
  ///   metrics  with the vocabulary whose scores they need (whole_scores()); 0:
  ///            outputs are as they are
  TrainingObjective(
      std::shared_ptr<const Objective> objective, bool text,
      TensorParallel parallel, const Group& data,
      std::vector<Metric> metrics = {}, int64_t vocabulary = 0);

  bool counts_tokens() const { return objective_->counts_tokens(); }
  bool counts_units() const { return objective_->counts_units(); }
  bool needs_whole_batch() const { return objective_->needs_whole_batch(); }

  /// `batch` on `device` as the model takes it: samples in `dtype`, images with
  /// channels last where that is faster (layers/channels_last.h), tokens and
  /// other ids as int64. In a context-parallel group, tokens and targets (also
  /// further ones with a number for each token) are those of this rank, and
  /// documents are whole. Where tokens are sharded or
  /// cut and the data has no document numbers, adds zeros: one document for
  /// each sample.
  Batch
  prepared(const Batch& batch, torch::Device device, torch::Dtype dtype) const;

  /// How many units the targets have; a scalar where its device counts them.
  std::variant<int64_t, torch::Tensor> count(const Tensors& targets) const;
  /// How many units the samples of the global batch that a prepared batch is
  /// part of have when no target is ignored.
  int64_t count_whole(const Batch& batch) const;

  torch::Tensor loss_sum(const Tensors& outputs, const Tensors& targets) const;

  /// Adds the loss of a microbatch.
  void add_loss(
      Score& score, const torch::Tensor& loss_sum,
      const Tensors& targets) const;
  /// Adds the loss, the right answers and the metrics of a microbatch. A metric
  /// that throws has failed for this evaluation: stderr says why.
  void
  evaluate(Score& score, const Tensors& outputs, const Tensors& targets) const;
  /// The same for a rank without samples, where others need it.
  void evaluate_none(
      Score& score, const Tensors& outputs, const Tensors& targets) const;

 private:
  torch::Tensor measure(const Tensors& outputs, const Tensors& targets) const;
  // Another rank of the context-parallel group counts the samples.
  bool only_has_tokens() const { return text_ && parallel_.context.rank() > 0; }

  std::shared_ptr<const Objective> objective_;
  bool text_;
  TensorParallel parallel_;
  BatchRanks ranks_;
  std::vector<Metric> metrics_;
  int64_t vocabulary_;
};

/// The outputs with the scores of the whole vocabulary, outputs[0], where this
/// rank has a shard of them; gradients are its shard's. Every rank of the
/// tensor-parallel group calls it.
Tensors whole_scores(
    const Tensors& outputs, int64_t vocabulary, const TensorParallel& parallel);

/// `objective` given whole_scores().
std::shared_ptr<const Objective> with_whole_scores(
    std::shared_ptr<const Objective> objective, int64_t vocabulary,
    const TensorParallel& parallel);

/// The numbers of Score::metrics.
int64_t metric_numbers(const std::vector<Metric>& metrics);
/// The values of the metrics that failed on no rank, by name.
///
///   sums  Score::metrics, over all ranks
std::vector<std::pair<std::string, double>> metric_values(
    const std::vector<Metric>& metrics, const double* sums, int64_t samples);

/// Cross-entropy of the classes' scores [n, classes, …], targets [n, …].
/// Scores of another shape are a ConfigError.
std::shared_ptr<const Objective> classification(int64_t classes);

/// Cross-entropy of the tokens' scores [n, sequence, vocabulary], targets
/// [n, sequence]; a negative target is ignored. A model may return the scores
/// and other losses [n] of each sample (of a mixture of experts), which are
/// then added to the loss of each of its targets. In a context-parallel group
/// each rank has the terms of its tokens. In a tensor-parallel group
/// the scores are those of the full vocabulary, or of this rank's shard
/// (even_range of `vocabulary`), and are never all-gathered.
/// `every_target_counts`: none is ignored, so that nothing needs to be counted.
std::shared_ptr<const Objective> next_token(
    int64_t vocabulary, const TensorParallel& parallel,
    bool every_target_counts = false);

/// Whether the data is text, for the next-token objective: inputs and targets
/// are one whole number for each position of a sequence.
bool is_text(const SampleSpec& spec);
/// Whether samples are images [channels, h, w], or what looks so.
bool is_image(const SampleSpec& spec);
/// The objective that comes with Echelon for such data.
std::shared_ptr<const Objective> objective_for(
    const SampleSpec& spec, int64_t classes, const TensorParallel& parallel);

/// The inputs of the model's first layer: batch.inputs, then batch.more.
Tensors inputs_of(const Batch& batch);
/// batch.targets, then batch.more_targets.
Tensors targets_of(const Batch& batch);
/// Samples [begin, begin + length) of a prepared batch.
Batch piece_of(const Batch& batch, int64_t begin, int64_t length);
/// The microbatches of a prepared batch, of equal size within one sample.
std::vector<Batch> split_batch(const Batch& batch, int64_t count);

/// The factor of the loss sum of each microbatch of `batch`, this rank's part
/// of a global batch. With it, data parallelism, which divides the sum of the
/// ranks' gradients by their number, gives the gradient of the mean over all
/// units: each unit weighs the same, on any rank.
///
///   data         the data-parallel group
///   count_units  whether to ask the other ranks how many units they have (one
///                small all-reduce); needed when a rank may have left samples
///                out, or when targets are ignored
///
/// Throws DataError when there is no unit at all, where the CPU counts them.
/// Elsewhere the factor is then finite, and the sums of the step show it.
LossFactor loss_scale(
    const TrainingObjective& objective, const Batch& batch, const Group& data,
    bool count_units);

/// The error of a global batch without any unit.
std::string no_units(bool counts_tokens);

}  // namespace echelon
