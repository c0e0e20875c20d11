// Dropout whose mask does not depend on the layout: whether an element is kept
// depends on its sample's key, the layer's name and its place in the sample
// alone. So the mask is the same on ranks that hold the same element, another
// for other elements, and that of one device however the tensor is cut.
//
// Element i of a sample is kept by word i of the Philox stream (philox.h) whose
// key is the XXH3 hash of the name and whose subsequence is the sample's key.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string_view>

#include "echelon/parallel/tensor/tensor_parallel.h"

namespace echelon {

/// What a dropout draws its numbers from.
struct DropoutSource {
  double probability = 0;  // of zero, in [0, 1)
  uint64_t stream = 0;     // of dropout_stream, one per place in the model
};

/// `name`: unique in the model, "transformer.h.0.attn.resid_dropout".
uint64_t dropout_stream(std::string_view name);

/// Where the rows (dim 0) of a tensor lie: row r holds elements [e, e + size)
/// of sample (first_row + r) / rows_per_sample, where size is that of a row and
/// e is first_element + ((first_row + r) % rows_per_sample) * size.
struct DropoutPlace {
  int64_t first_row = 0;
  int64_t rows_per_sample = 1;
  int64_t first_element = 0;
};

/// Of x [batch, sequence, hidden], or with cut tokens x [tokens_r, hidden].
DropoutPlace place_of_tokens(
    const TensorParallel& parallel, int64_t batch, int64_t sequence);

/// Of attention probabilities [batch, heads_r, queries, keys], the heads from
/// `first_head` of all.
DropoutPlace place_of_heads(int64_t first_head, int64_t queries, int64_t keys);

/// x with some elements zero and the others divided by 1 - probability.
///
///   x        floating, dim 0 as `place` says
///   keys     int64 [batch], a number for each sample of the batch
///   returns  a new tensor; x itself where the probability is 0
///
/// Differentiable any number of times. A mask of one byte per element is kept.
/// One core of a CPU makes a million elements in about 2 ms; other devices make
/// the same mask by about 150 operators on integers, which is slow.
/// Throws ConfigError for a probability outside [0, 1), keys that are no such
/// numbers, or too few of them.
torch::Tensor dropout(
    const torch::Tensor& x, const torch::Tensor& keys,
    const DropoutSource& source, const DropoutPlace& place = {});

namespace detail {

/// Which elements of a tensor like `x` are kept: bool, contiguous. On the CPU
/// by a loop, elsewhere by keep_mask_by_operators.
torch::Tensor keep_mask(
    const torch::Tensor& x, const torch::Tensor& keys,
    const DropoutSource& source, const DropoutPlace& place);

/// The same bits by operators that every device has.
torch::Tensor keep_mask_by_operators(
    const torch::Tensor& x, const torch::Tensor& keys,
    const DropoutSource& source, const DropoutPlace& place);

}  // namespace detail
}  // namespace echelon
