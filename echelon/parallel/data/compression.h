// Communication hooks: how the gradients of a bucket are averaged.
#pragma once

#include <cstdint>

#include "echelon/parallel/data/gradient_bucket.h"

namespace echelon {

/// The sum, then divided: exact. The default.
BucketHook all_reduce_hook();

/// Sends bfloat16: half the bytes of float32. The sum is taken in bfloat16,
/// then divided in the gradient's dtype: each rank's rounding is at most 2^-8
/// relative, and each addition rounds again unless the backend adds in float32.
BucketHook bf16_hook();

/// Sends float16: half the bytes of float32, three more bits than bfloat16.
/// Divided before it is sent, so that a sum of representable means cannot
/// overflow; a gradient beyond 65504 becomes infinite, one under 6e-8 zero.
BucketHook fp16_hook();

struct PowerSgdOptions {
  /// Rank of the approximation: a matrix [n, m] is sent as (n + m) * rank
  /// numbers.
  int64_t rank = 1;
  /// Backward passes that are reduced exactly before compression begins. The
  /// gradients change most at the start.
  int64_t start_iteration = 1000;
  /// A matrix is compressed when this makes it at least so many times smaller.
  double min_compression = 2.0;
  /// Add what compression lost in one step to the next step's gradient.
  bool error_feedback = true;
  /// Start from the last step's factor instead of from random numbers.
  bool warm_start = true;
  uint64_t seed = 0;  // the same on every rank
};

/// Sends a low-rank approximation of each matrix; vectors and matrices too
/// small to gain travel as they are. A gradient [n, …] is the matrix [n, rest].
/// One power iteration per step, from the last step's factor. The result is the
/// same on every rank; exact where `rank` >= min(n, m). Each rank keeps a copy
/// of its error in memory. The hook has state: one hook serves one wrapper.
/// Source: Vogels, Karimireddy, Jaggi, "PowerSGD", 2019, arXiv:1905.13727,
/// algorithms 1 and 2. Factors are made orthonormal by Householder QR.
BucketHook powersgd_hook(const PowerSgdOptions& options = {});

}  // namespace echelon
