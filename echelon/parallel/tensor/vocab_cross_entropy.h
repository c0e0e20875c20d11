// Cross-entropy and accuracy over a vocabulary that stays cut: rank r has the
// logits of ids even_range(vocabulary, r, ranks), and nobody gathers them.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>

#include "echelon/parallel/tensor/tensor_parallel.h"

namespace echelon {

/// -log softmax(logits)[target] of each token.
///
///   logits   [..., vocabulary_r]
///   targets  [...], int64, the same on every rank; ids of the whole
///   vocabulary,
///            or `ignore_index`
///   returns  [...], the same on every rank; 0 where the target is ignored.
///            float32 when the logits are float16 or bfloat16
///
/// One all-gather of three numbers a token; backward communicates nothing. The
/// logits are read once in forward, and are all that backward keeps, beside one
/// number a token. All ranks of the group call.
///
/// DataError for a target outside of the vocabulary, with its position and
/// value (on a GPU a device-side assertion); ConfigError for shapes that do not
/// fit.
torch::Tensor vocab_cross_entropy(
    const torch::Tensor& logits, const torch::Tensor& targets,
    int64_t vocabulary, const TensorParallel& parallel,
    int64_t ignore_index = -100, const std::string& label = "lm_head");

/// The id of the largest logit of each token; the least of equal ones.
///
///   logits   [..., vocabulary_r]
///   returns  [...], int64, the same on every rank
///
/// One all-gather of two numbers a token. No gradient.
torch::Tensor vocab_argmax(
    const torch::Tensor& logits, int64_t vocabulary,
    const TensorParallel& parallel, const std::string& label = "lm_head");

}  // namespace echelon
