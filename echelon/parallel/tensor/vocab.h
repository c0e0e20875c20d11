// Layers over a vocabulary that is sharded over the ranks: rank r has the ids
// even_range(vocabulary, r, ranks). Token embeddings, cross-entropy and argmax;
// logits are never all-gathered. Beside them position embeddings.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>

#include "echelon/layers/sharded_module.h"
#include "echelon/parallel/tensor/tensor_parallel.h"

namespace echelon {

/// weight [vocabulary_r, hidden]: the rows even_range(vocabulary, rank, ranks).
/// Each rank looks up its own ids, and the results are summed over the ranks.
class VocabParallelEmbedding : public ShardedModule {
 public:
  VocabParallelEmbedding(
      int64_t vocabulary, int64_t hidden, TensorParallel parallel,
      std::string label);

  /// ids [batch, sequence], int32 or int64, the same on every rank -> [batch,
  /// sequence, hidden], or with sharded tokens this rank's [tokens_r, hidden].
  /// Costs one all-reduce; with sharded tokens one reduce-scatter, and one
  /// all-gather in backward. Every rank of the group calls this.
  ///
  /// Throws DataError for an id outside of the vocabulary, with its position
  /// and value. On a GPU it is a device-side assertion, since a check would
  /// stall the stream.
  torch::Tensor forward(const torch::Tensor& ids);

  torch::Tensor weight;

 private:
  int64_t vocabulary_;
  TensorParallel parallel_;
  std::string label_;
};

/// Learned positions: weight [positions, hidden] on every rank. With sharded
/// tokens its gradient is this rank's term of a sum.
class PositionEmbedding : public ShardedModule {
 public:
  PositionEmbedding(int64_t positions, int64_t hidden, TensorParallel parallel);

  /// Adds to each token the weight of its position in its sample.
  ///
  ///   x        [batch, sequence, hidden], or this rank's [tokens_r, hidden]
  ///   like     any tensor [batch, sequence, …] of whole sequences, for the
  ///            shape of the batch
  ///   returns  a tensor like x
  ///
  /// Throws ConfigError when the sequence is longer than `positions`.
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& like);

  torch::Tensor weight;

 private:
  TensorParallel parallel_;
};

/// Scores of each id of the vocabulary: x times the rows of a weight, as
/// column_linear.
///
///   weight   [vocabulary_r, hidden]
///   returns  [..., vocabulary_r]
///
/// On a GPU the matmuls are padded to a multiple of kPaddedRows columns,
/// because libraries have only slow kernels for rows that are not aligned, as
/// those of GPT-2's 50,257 ids. Where the memory of the weight has rows of
/// zeros behind it (layers/parameter_owner.h), they are used, and else a copy
/// of the weight. The result is a view of the first columns: its rows may be
/// further apart than they are wide.
torch::Tensor vocab_logits(
    const torch::Tensor& x, const torch::Tensor& weight,
    const TensorParallel& parallel, int64_t tokens,
    const std::string& label = "lm_head");

namespace detail {

/// vocab_logits with a copy of the weight that has `padding` rows of zeros
/// more. A gradient that was given to allow_widening(), with room for the
/// columns behind each row, becomes the gradient of all columns in place;
/// another one is copied.
torch::Tensor padded_logits(
    const torch::Tensor& x, const torch::Tensor& weight, int64_t padding,
    const TensorParallel& parallel, int64_t tokens, const std::string& label);

/// Says that nobody else uses what is behind the rows of `gradient`, so that it
/// may be widened in place.
void allow_widening(const torch::Tensor& gradient);

}  // namespace detail

/// -log softmax(logits)[target] of each token.
///
///   logits   [..., vocabulary_r]
///   targets  [...], int64, the same on every rank: ids of the vocabulary, or
///            `ignore_index`
///   returns  [...], the same on every rank: 0 where the target is ignored;
///            float32 for logits of float16 or bfloat16
///
/// Costs one all-gather of three numbers per token; backward communicates
/// nothing. Forward reads the logits once, and stores them and one number per
/// token for backward. Every rank of the group calls this.
///
/// Throws DataError for a target outside of the vocabulary, with its position
/// and value (on a GPU, a device-side assertion), and ConfigError for shapes
/// that do not match.
torch::Tensor vocab_cross_entropy(
    const torch::Tensor& logits, const torch::Tensor& targets,
    int64_t vocabulary, const TensorParallel& parallel,
    int64_t ignore_index = -100, const std::string& label = "lm_head");

/// The id of the largest logit of each token; among equal logits the least id.
///
///   logits   [..., vocabulary_r]
///   returns  [...], int64, the same on every rank
///
/// Costs one all-gather of two numbers per token. No gradient. Every rank of
/// the group calls this.
torch::Tensor vocab_argmax(
    const torch::Tensor& logits, int64_t vocabulary,
    const TensorParallel& parallel, const std::string& label = "lm_head");

}  // namespace echelon
