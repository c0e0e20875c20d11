// Dropout whose mask does not depend on the layout. Whether an element is kept
// depends only on its sample's key, the layer's name and its position in the
// sample. So ranks that hold the same element agree on it, and any sharding
// gives the mask of one device.
//
// Element i of a sample is kept by word i of the Philox stream (philox.h) whose
// key is the XXH3 hash of the name and whose subsequence is the sample's key.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "echelon/layout/shard.h"
#include "echelon/parallel/tensor/tensor_parallel.h"

namespace echelon {

/// The random numbers of one dropout layer.
struct DropoutSource {
  double probability = 0;  // of zero, in [0, 1)
  uint64_t stream = 0;     // of dropout_stream, one per layer of the model
};

/// The stream of a layer. `name` is unique in the model:
/// "transformer.h.0.attn.resid_dropout".
uint64_t dropout_stream(std::string_view name);

/// The position of a tensor's rows (dim 0) in their samples: row r has the
/// elements [e, e + size) of sample (first_row + r) / rows_per_sample, where
/// `size` is that of a row and e = first_element + ((first_row + r) %
/// rows_per_sample) * size.
struct DropoutPlace {
  int64_t first_row = 0;
  int64_t rows_per_sample = 1;
  int64_t first_element = 0;
  /// Where only some rows of each sample are here, which ones, in the order in
  /// which they are: row i of a sample takes the place of number i of these.
  /// Empty: all of them.
  std::vector<IndexRange> rows;
  /// Where only some elements of each row are here: how many it has. Those here
  /// begin at first_element. 0: all are here.
  int64_t row_elements = 0;
};

/// For x [batch, sequence, hidden], or with sharded tokens x [tokens_r,
/// hidden].
///
///   total  the tokens of whole sequences, in a context-parallel group, where
///          `sequence` is this rank's; x is then [batch * sequence, hidden] or
///          [tokens_r, hidden]
DropoutPlace place_of_tokens(
    const TensorParallel& parallel, int64_t batch, int64_t sequence,
    int64_t total = 0);

/// For attention probabilities [batch, heads_r, queries, keys] of the heads
/// that begin at `first_head`.
DropoutPlace place_of_heads(int64_t first_head, int64_t queries, int64_t keys);

/// The same for a part of the probabilities of sequences of `sequence` tokens,
/// flattened to [batch * heads * queries, keys].
DropoutPlace place_of_scores(
    const IndexRange& heads, const IndexRange& queries, const IndexRange& keys,
    int64_t sequence);

/// Sets some elements of x to zero, and divides the others by 1 - probability.
///
///   x        floating-point, with rows at `place`
///   keys     int64 [batch], a random number for each sample of the batch
///   residual is added to the result, in the same pass where its dtype and
///            sizes are those of x; undefined: nothing is
///   returns  a new tensor; x itself where the probability is 0 and nothing is
///            added
///
/// Differentiable any number of times. Stores a mask of one byte per element. A
/// CPU core makes a million elements in about 2 ms; GPUs have a kernel. Throws
/// ConfigError for a probability outside [0, 1), and for keys of another type
/// or too few keys.
torch::Tensor dropout(
    const torch::Tensor& x, const torch::Tensor& keys,
    const DropoutSource& source, const DropoutPlace& place = {},
    const torch::Tensor& residual = {});

namespace detail {

/// True for the elements of a tensor like `x` that are kept: bool, contiguous.
/// Computed by a loop on the CPU, by a kernel on GPUs, elsewhere by
/// keep_mask_by_operators.
torch::Tensor keep_mask(
    const torch::Tensor& x, const torch::Tensor& keys,
    const DropoutSource& source, const DropoutPlace& place);

/// The same mask by operators that every device has.
torch::Tensor keep_mask_by_operators(
    const torch::Tensor& x, const torch::Tensor& keys,
    const DropoutSource& source, const DropoutPlace& place);

}  // namespace detail
}  // namespace echelon
