// Averages gradients over a group while backward still runs.
//
// Parameters are cut into buckets. A bucket is handed to the hook as soon as
// its last gradient is there, so that communication runs beside the rest of
// backward, and backward returns when all buckets are done. The first backward
// shows in which order gradients become ready; the buckets are then cut anew in
// rank 0's order.
//
// A large gradient is a bucket of its own and is reduced where autograd left
// it; small ones are copied into one buffer, and are parts of it from then on:
// no copy back. Who still holds such a gradient after zero_grad() has let go of
// it keeps its values; the buffer is a new one then. LibTorch's reducer copies
// all gradients and divides in a pass of its own, and learns one step late that
// a parameter had no gradient; that is why it is not used here.
//
// Source: Li et al., "PyTorch Distributed", 2020, arXiv:2006.15704.
#pragma once

#include <torch/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "echelon/comm/group.h"
#include "echelon/parallel/data/gradient_bucket.h"

namespace echelon {

struct ReducerOptions {
  /// Small gradients are collected until they fill this many bytes.
  int64_t bucket_bytes = 25 << 20;
  /// The same for the first bucket, which should start early.
  int64_t first_bucket_bytes = 1 << 20;
  /// A gradient of at least this many bytes is a bucket of its own.
  int64_t in_place_bytes = 256 << 10;
  /// Allow parameters that get no gradient in a backward pass, on some ranks or
  /// on all. Costs one small all_reduce at the end of backward, and buckets
  /// with such a parameter start only there. Where no rank used a parameter,
  /// its gradient is left as it was.
  bool find_unused_parameters = false;
};

/// A parameter, and the name that errors call it by.
struct NamedParameter {
  std::string name;
  torch::Tensor tensor;  // a dense leaf that requires grad
};

/// Who takes part in one backward pass, when not all ranks have data.
struct BackwardRound {
  int64_t divisor = 1;  // of the sums
  int source = 0;       // a rank that takes part: its order of buckets counts
};

/// Every rank of the group makes one, with the same parameters (the caller has
/// checked) and options. Its hooks live on the parameters until it is
/// destroyed. Thread-safe for backward on several devices; one backward at a
/// time.
class GradientReducer {
 public:
  GradientReducer(
      std::vector<NamedParameter> parameters, Group group, BucketHook hook,
      ReducerOptions options = {});
  ~GradientReducer();
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  /// While false, backward leaves gradients local; they take part in the next
  /// backward that reduces.
  void enable(bool enabled);
  bool enabled() const;

  /// For a step whose gradients become complete in several backward passes (a
  /// pipeline's, whose weight gradients come apart from the inputs'): between
  /// the two calls each gradient that autograd accumulates is taken as complete
  /// and reduced, whether enabled or not; finish_round() waits for all of them,
  /// and throws what backward would.
  void begin_round();
  void finish_round();

  /// A new forward: forgets a backward that ended by an exception.
  void before_forward();
  /// `output` of the module: its backward starts the round, also when it
  /// reaches no parameter.
  void watch(const torch::Tensor& output);

  /// Asked at the start of each backward that reduces; null: every rank takes
  /// part.
  void on_begin(std::function<BackwardRound()> listener);
  /// Takes part in the other ranks' backward with zeros, and touches no
  /// gradient of this rank.
  void shadow(const BackwardRound& round);

  /// Names of the parameters, by bucket.
  std::vector<std::vector<std::string>> buckets() const;

  struct Impl;

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace echelon
