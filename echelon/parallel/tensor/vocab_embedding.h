// Embeddings of tokens whose table is cut along the vocabulary, and of
// positions.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>

#include "echelon/layers/sharded_module.h"
#include "echelon/parallel/tensor/tensor_parallel.h"

namespace echelon {

/// weight [vocabulary_r, hidden]: the rows even_range(vocabulary, rank, ranks).
/// Each rank looks up the ids that it has, and the rows are summed.
class VocabParallelEmbedding : public ShardedModule {
 public:
  VocabParallelEmbedding(
      int64_t vocabulary, int64_t hidden, TensorParallel parallel,
      std::string label);

  /// ids [batch, sequence], int32 or int64, the same on every rank ->
  /// [batch, sequence, hidden], or with cut tokens this rank's
  /// [tokens_r, hidden]. One all-reduce, or reduce-scatter; backward gathers
  /// the gradient when tokens are cut. All ranks of the group call.
  ///
  /// DataError for an id outside of the vocabulary, with its position and
  /// value; on a GPU, where looking would stop the stream, a device-side
  /// assertion.
  torch::Tensor forward(const torch::Tensor& ids);

  torch::Tensor weight;

 private:
  int64_t vocabulary_;
  TensorParallel parallel_;
  std::string label_;
};

/// Learned positions: weight [positions, hidden], whole on every rank. Its
/// gradient is this rank's part of a sum when tokens are cut.
class PositionEmbedding : public ShardedModule {
 public:
  PositionEmbedding(int64_t positions, int64_t hidden, TensorParallel parallel);

  /// x plus the weight of each token's position in its sample.
  ///
  ///   x        [batch, sequence, hidden], or with cut tokens [tokens_r,
  ///   hidden] like     any tensor [batch, sequence, …]: how the tokens are
  ///   laid returns  as x
  ///
  /// ConfigError when the sequence is longer than the positions.
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& like);

  torch::Tensor weight;

 private:
  TensorParallel parallel_;
};

}  // namespace echelon
