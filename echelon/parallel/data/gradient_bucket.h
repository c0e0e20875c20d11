// What a communication hook gets: the gradients that are reduced together.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "echelon/comm/group.h"

namespace echelon {

/// The gradients of some parameters, on this rank, ready to be reduced.
struct GradientBucket {
  int64_t index = 0;               // buckets are reduced in this order
  bool last = false;               // of this backward pass
  std::string label;               // "bucket 0": for Call::label
  std::vector<std::string> names;  // of the parameters
  /// One per parameter, in its shape, in the memory of `flat`.
  std::vector<torch::Tensor> gradients;
  /// [numel] all of them, one memory. Reduced in place.
  torch::Tensor flat;
  /// What the sum over the ranks is divided by; the group's size, or less when
  /// ranks ran out of data.
  int64_t divisor = 1;
};

/// Waits for what a hook started, and leaves the mean in the bucket. Called at
/// the end of backward, in order of the buckets; may be empty.
using BucketCompletion = std::function<void()>;

/// Starts the reduction of one bucket. Called while backward runs, with the
/// same buckets in the same order on every rank. When its completion returns,
/// `bucket.flat` holds (sum over ranks) / divisor, or what stands for it. The
/// bucket lives until then.
using BucketHook =
    std::function<BucketCompletion(GradientBucket& bucket, const Group& group)>;

}  // namespace echelon
