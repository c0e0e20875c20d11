// Communication hooks: how data parallelism averages the gradients of a bucket,
// and what it sends for that.
//
//   DistributedDataParallel<Net> ddp(
//       net, world.group(), {.hook = bf16_hook()});
//
// A hook of your own is a function that starts the communication and returns
// one that waits for it:
//
//   BucketHook sum = [](GradientBucket& bucket, const Group& group) {
//     Work work = group.all_reduce(
//         bucket.flat, ReduceOp::sum, {.label = bucket.label, .async = true});
//     return [work, &bucket] {
//       work.wait();
//       bucket.flat.div_(bucket.divisor);
//     };
//   };
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "echelon/comm/group.h"

namespace echelon {

/// Gradients of this rank that are reduced together.
struct GradientBucket {
  int64_t index = 0;               // buckets are reduced in this order
  bool last = false;               // of this backward pass
  std::string label;               // "bucket 0": for Call::label
  std::vector<std::string> names;  // of the parameters
  /// One per parameter, in its shape: views of `flat`.
  std::vector<torch::Tensor> gradients;
  /// [numel] all of them in one block of memory. Reduced in place.
  torch::Tensor flat;
  /// What the sum over the ranks is divided by: the group's size, or less once
  /// ranks have run out of data.
  int64_t divisor = 1;
};

/// Waits for the communication that a hook started, and leaves the mean in the
/// bucket. Called at the end of backward, in the order of the buckets. May be
/// empty.
using BucketCompletion = std::function<void()>;

/// Starts the reduction of one bucket. Called while backward runs, with the
/// same buckets in the same order on every rank. When its completion returns,
/// `bucket.flat` holds (sum over ranks) / divisor, or an approximation of it.
/// The bucket lives until then.
using BucketHook =
    std::function<BucketCompletion(GradientBucket& bucket, const Group& group)>;

/// The exact mean: all-reduces the sum, then divides. The default.
BucketHook all_reduce_hook();

/// Sends bfloat16: half the bytes of float32. Sums in bfloat16, then divides in
/// the gradient's dtype. Each rank rounds by at most 2^-8 relative, and each
/// addition rounds again unless the backend adds in float32.
BucketHook bf16_hook();

/// Sends float16: half the bytes of float32, three more bits than bfloat16.
/// Divides before sending, so that a sum of representable means cannot
/// overflow. A gradient beyond 65504 becomes infinite, one under 6e-8 zero.
BucketHook fp16_hook();

struct PowerSgdOptions {
  /// Rank of the approximation: a matrix [n, m] is sent as (n + m) * rank
  /// numbers.
  int64_t rank = 1;
  /// Backward passes that are reduced exactly before compression begins.
  /// Gradients change most at the start.
  int64_t start_iteration = 1000;
  /// Compress a matrix if that makes it at least this many times smaller.
  double min_compression = 2.0;
  /// Add what compression lost in one step to the next step's gradient.
  bool error_feedback = true;
  /// Start from the last step's factor instead of from random numbers.
  bool warm_start = true;
  uint64_t seed = 0;  // the same on every rank
};

/// Sends a low-rank approximation of each matrix; vectors, and matrices too
/// small to gain, are sent exactly. A gradient [n, …] is the matrix [n, rest].
/// Runs one power iteration per step, from the last step's factor. The result
/// is the same on every rank, and exact where `rank` >= min(n, m). Each rank
/// stores a copy of its error. The hook has state: use one hook for one
/// wrapper. Throws ConfigError for a rank below 1.
///
/// Source: Vogels, Karimireddy, Jaggi, "PowerSGD", 2019, arXiv:1905.13727,
/// algorithms 1 and 2. Factors are made orthonormal by Householder QR.
BucketHook powersgd_hook(const PowerSgdOptions& options = {});

}  // namespace echelon
