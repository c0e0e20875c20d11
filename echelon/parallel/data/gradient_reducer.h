// Averages gradients over a group while backward still runs.
//
// Parameters are grouped into buckets. A bucket is handed to the hook as soon
// as its last gradient is complete, so communication overlaps with the rest of
// backward; backward returns when all buckets are reduced. The first backward
// shows the order in which gradients become ready. The buckets are then rebuilt
// in rank 0's order.
//
// A large gradient is a bucket of its own and is reduced where autograd left
// it. Small gradients are copied into one buffer and are views of it from then
// on, so nothing is copied back. If someone still holds such a gradient after
// zero_grad(), its values are kept: the bucket then gets a new buffer.
//
// LibTorch's reducer is not used because it copies all gradients, divides in a
// separate pass, and learns one step late that a parameter had no gradient.
//
// Source: Li et al., "PyTorch Distributed", 2020, arXiv:2006.15704.
#pragma once

#include <torch/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "echelon/comm/group.h"
#include "echelon/parallel/data/communication_hooks.h"

namespace echelon {

/// The same on every rank.
struct DistributedDataParallelOptions {
  /// Small gradients are collected in a bucket until they fill this many bytes.
  int64_t bucket_bytes = 25 << 20;
  /// The same for the first bucket, whose reduction should start early.
  int64_t first_bucket_bytes = 1 << 20;
  /// A gradient of at least this many bytes is a bucket of its own.
  int64_t in_place_bytes = 256 << 10;
  /// Allow parameters that get no gradient in a backward pass, on some or all
  /// ranks. Costs one small all_reduce at the end of backward, and buckets with
  /// such a parameter start only then. A parameter that no rank used keeps its
  /// gradient.
  bool find_unused_parameters = false;
  /// Allow a module without a parameter that requires gradients: buffers are
  /// broadcast, and nothing is reduced.
  bool may_be_frozen = false;
  /// Before each forward in training whose gradients will be reduced, broadcast
  /// rank 0's buffers (running statistics of BatchNorm, counters).
  bool broadcast_buffers = true;
  /// While the wrapper lives, BatchNorm normalises over the batches of all
  /// ranks: see convert_sync_batch_norm.
  bool sync_batch_norm = false;
  /// How a bucket is averaged; null: all_reduce_hook().
  BucketHook hook;
  /// Parameters that are neither compared nor reduced, such as experts, of
  /// which each rank has others; null: none.
  std::function<bool(const std::string& parameter)> leaves_out;
};

/// A parameter, with its name for errors.
struct NamedParameter {
  std::string name;
  torch::Tensor tensor;  // a dense leaf that requires grad
};

/// One backward pass in which not all ranks may have data.
struct BackwardRound {
  int64_t divisor = 1;  // of the sums
  int source = 0;       // a rank with data, whose order of buckets counts
};

/// Every rank of the group constructs one, with the same options and the same
/// parameters (the caller has checked that). Its hooks stay on the parameters
/// until it is destroyed. Thread-safe for a backward on several devices; one
/// backward at a time.
class GradientReducer {
 public:
  GradientReducer(
      std::vector<NamedParameter> parameters, Group group,
      const DistributedDataParallelOptions& options);
  ~GradientReducer();
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  /// While disabled, backward leaves gradients local. The next backward that
  /// reduces includes them.
  void enable(bool enabled);
  bool enabled() const;

  /// For a step whose gradients are completed by several backward passes, as in
  /// a pipeline. Between the two calls, each gradient that autograd accumulates
  /// counts as complete and is reduced, whether enabled or not. finish_round()
  /// waits for all of them, and throws what backward would throw.
  void begin_round();
  void finish_round();

  /// Call before each forward: discards a backward that ended by an exception.
  void before_forward();
  /// Makes a backward from this output of the module start a round, even if it
  /// reaches no parameter.
  void watch(const torch::Tensor& output);

  /// `listener` is called at the start of each backward that reduces, and tells
  /// which ranks have data; null: all of them.
  void on_begin(std::function<BackwardRound()> listener);
  /// Joins the other ranks' backward with zeros. Changes no gradient of this
  /// rank.
  void shadow(const BackwardRound& round);

  /// Names of the parameters, by bucket.
  std::vector<std::vector<std::string>> buckets() const;

  struct Impl;

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace echelon
