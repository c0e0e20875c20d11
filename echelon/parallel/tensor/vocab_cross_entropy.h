// Cross-entropy and argmax over a sharded vocabulary: rank r has the logits of
// ids even_range(vocabulary, r, ranks), which are never all-gathered.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>

#include "echelon/parallel/tensor/tensor_parallel.h"

namespace echelon {

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
