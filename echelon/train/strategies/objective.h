// What a model is trained for: the loss, the units that it is a mean over, and
// which answers are right.
//
//   classification   a sample has one answer (or one per pixel); units: samples
//   next token       a sample is a text, and every token but the ignored ones
//   has
//                    an answer, the word that follows; units: tokens
//
// The loss of a step is the sum over all units of the global batch, divided by
// their number, whatever the layout.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>

#include "echelon/comm/group.h"
#include "echelon/data/dataset.h"
#include "echelon/layers/layer_list.h"
#include "echelon/parallel/tensor/tensor_parallel.h"

namespace echelon {

/// Losses and right answers over some batches.
struct Score {
  double loss_sum = 0;
  int64_t count = 0;    // units
  int64_t correct = 0;  // of these, in evaluation; training does not look
  int64_t samples = 0;

  Score& operator+=(const Score& other);
};

/// Ranks that compute each layer together (tensor parallel) call all of it
/// together and get the same numbers.
class Objective {
 public:
  virtual ~Objective() = default;

  /// Whether units are tokens; else they are samples.
  virtual bool counts_tokens() const = 0;

  /// `batch` on `device` as the model takes it: samples in `dtype`; tokens as
  /// int64, with documents of zeros, which is one text each, where tokens are
  /// cut and the data names none.
  virtual Batch prepared(
      const Batch& batch, torch::Device device, torch::Dtype dtype) const = 0;

  /// How many units `targets` [n, …] has.
  virtual int64_t count(const torch::Tensor& targets) const = 0;
  /// How many `samples` samples have, when none of their targets is ignored;
  /// `targets` says what one looks like.
  virtual int64_t
  count_whole(const torch::Tensor& targets, int64_t samples) const = 0;

  /// The sum of the units' losses, one differentiable number, in float32 or
  /// float64. `outputs`: what the model's last layer returns.
  virtual torch::Tensor
  loss_sum(const Tensors& outputs, const torch::Tensor& targets) const = 0;
  /// Units whose answer with the highest score is the right one.
  virtual int64_t
  count_correct(const Tensors& outputs, const torch::Tensor& targets) const = 0;

  /// Adds the loss of one piece of a batch.
  void add_loss(
      Score& score, const torch::Tensor& loss_sum,
      const torch::Tensor& targets) const;
  /// Adds the loss and the right answers of one piece of a batch.
  void evaluate(
      Score& score, const Tensors& outputs, const torch::Tensor& targets) const;
};

/// Cross-entropy of the classes' scores [n, classes, …], targets [n, …].
std::unique_ptr<Objective> classification();

/// Cross-entropy of the words' scores [n, sequence, words] per token, targets
/// [n, sequence]; a negative target is ignored. In a tensor-parallel group the
/// scores are those of all words, or of this rank's (even_range of
/// `vocabulary`), and are never gathered.
std::unique_ptr<Objective>
next_token(int64_t vocabulary, const TensorParallel& parallel);

/// What data of this kind is for: the next token, when both inputs and targets
/// are one number for each position of a sequence; else classification.
bool is_text(const SampleSpec& spec);
std::unique_ptr<Objective> objective_for(
    const SampleSpec& spec, int64_t classes, const TensorParallel& parallel);

/// What the model's first layer takes of a batch: the inputs, then Batch::more.
Tensors inputs_of(const Batch& batch);
/// Samples [begin, begin + length) of a batch that is prepared.
Batch piece_of(const Batch& batch, int64_t begin, int64_t length);

/// What the loss sum of any piece of `batch`, this rank's part of a global
/// batch, is multiplied with, so that data parallelism, which divides the sum
/// of the ranks' gradients by their number, gives those of the mean over all
/// units: each unit weighs the same, on whichever rank it is.
///
///   data         the ranks with the other parts
///   count_units  ask them how many units they have (one small all-reduce);
///                needed when a rank may have left samples out, or when targets
///                are ignored
///
/// Throws DataError when there is no unit at all.
double loss_scale(
    const Objective& objective, const Batch& batch, const Group& data,
    bool count_units);

}  // namespace echelon
