// What a model is trained for: the loss, the units that it is a mean over, and
// which answers are right.
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
    int64_t count = 0;    // units
    int64_t correct = 0;  // of these, in evaluation; not counted in training
    int64_t samples = 0;
  };

  // Scalars to be summed: float32 or float64, int64, int64.
  std::vector<torch::Tensor> losses;
  std::vector<torch::Tensor> counts;  // in addition to `count`
  std::vector<torch::Tensor> corrects;
  int64_t count = 0;
  int64_t samples = 0;

  Score& operator+=(const Score& other);
  /// [loss sum, count, correct, samples], float64 on `device`. Waits for
  /// nothing.
  torch::Tensor sums(torch::Device device) const;
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

/// All ranks of a tensor-parallel group call each method together and get the
/// same numbers. Ranks of a context-parallel group have numbers of their own
/// tokens; the first of them counts the samples.
class TrainingObjective {
 public:
  virtual ~TrainingObjective() = default;

  /// Whether units are tokens; else they are samples.
  virtual bool counts_tokens() const = 0;

  /// `batch` on `device` as the model takes it: samples in `dtype`, tokens as
  /// int64. In a context-parallel group, tokens and targets are those of this
  /// rank, and documents are whole. Where tokens are sharded or cut and the
  /// data has no document numbers, adds zeros: one document for each sample.
  virtual Batch prepared(
      const Batch& batch, torch::Device device, torch::Dtype dtype) const = 0;

  /// How many units `targets` [n, …] has; an int64 scalar where its device
  /// counts them.
  virtual std::variant<int64_t, torch::Tensor>
  count(const torch::Tensor& targets) const = 0;
  /// How many units the samples of the global batch that a prepared batch is
  /// part of have when no target is ignored.
  virtual int64_t count_whole(const Batch& batch) const = 0;
  /// Of the samples of a prepared batch, those that this rank counts.
  virtual int64_t count_samples(const torch::Tensor& targets) const {
    return targets.size(0);
  }

  /// The sum of the units' losses, a differentiable scalar in float32 or
  /// float64. `outputs` is what the model's last layer returns.
  virtual torch::Tensor
  loss_sum(const Tensors& outputs, const torch::Tensor& targets) const = 0;
  /// Units whose answer with the highest score is the right one, an int64
  /// scalar.
  virtual torch::Tensor
  count_correct(const Tensors& outputs, const torch::Tensor& targets) const = 0;

  /// Adds the loss of a microbatch.
  void add_loss(
      Score& score, const torch::Tensor& loss_sum,
      const torch::Tensor& targets) const;
  /// Adds the loss and the right answers of a microbatch.
  void evaluate(
      Score& score, const Tensors& outputs, const torch::Tensor& targets) const;
};

/// Cross-entropy of the classes' scores [n, classes, …], targets [n, …].
/// Scores of another shape are a ConfigError.
std::unique_ptr<TrainingObjective> classification(int64_t classes);

/// Cross-entropy of the tokens' scores [n, sequence, vocabulary], targets
/// [n, sequence]; a negative target is ignored. A model may return the scores
/// and other losses [n] of each sample (of a mixture of experts), which are
/// then added to the loss of each of its targets. In a tensor-parallel group
/// the scores are those of the full vocabulary, or of this rank's shard
/// (even_range of `vocabulary`), and are never all-gathered.
/// `every_target_counts`: none is ignored, so that nothing needs to be counted.
std::unique_ptr<TrainingObjective> next_token(
    int64_t vocabulary, const TensorParallel& parallel,
    bool every_target_counts = false);

/// Whether the data is text, for the next-token objective: inputs and targets
/// are one whole number for each position of a sequence.
bool is_text(const SampleSpec& spec);
std::unique_ptr<TrainingObjective> objective_for(
    const SampleSpec& spec, int64_t classes, const TensorParallel& parallel);

/// The inputs of the model's first layer: batch.inputs, then batch.more.
Tensors inputs_of(const Batch& batch);
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
