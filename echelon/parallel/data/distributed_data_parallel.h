// Data parallelism: every rank holds the whole model and computes on its own
// part of the batch; backward leaves the mean of the gradients on all of them.
//
//   DistributedDataParallel<Net> ddp(net, world.group());
//   auto loss = cross_entropy(ddp(x), y);
//   loss.backward();        // gradients are averaged while this runs
//   optimizer.step();       // on net->parameters(), the same on every rank
//
// Source: Li et al., "PyTorch Distributed", 2020, arXiv:2006.15704.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "echelon/comm/group.h"
#include "echelon/parallel/data/compression.h"
#include "echelon/parallel/data/gradient_bucket.h"
#include "echelon/parallel/data/gradient_reducer.h"
#include "echelon/parallel/data/sync_batch_norm.h"

namespace echelon {

/// The same on every rank.
struct DistributedDataParallelOptions {
  int64_t bucket_bytes = 25 << 20;  // see ReducerOptions
  int64_t first_bucket_bytes = 1 << 20;
  int64_t in_place_bytes = 256 << 10;
  bool find_unused_parameters = false;
  /// Before each forward in training that will be reduced, every rank takes
  /// rank 0's buffers (running statistics of BatchNorm, counters).
  bool broadcast_buffers = true;
  /// BatchNorm over the batches of all ranks: convert_sync_batch_norm, for as
  /// long as the wrapper lives.
  bool sync_batch_norm = false;
  /// How a bucket is averaged; null is all_reduce_hook().
  BucketHook hook;
};

struct JoinOptions {
  /// Once ranks ran out of data, gradients are still divided by the group's
  /// size (a joined rank's batch counts as zeros). False: by the number of
  /// ranks that still have data.
  bool divide_by_initial_size = true;
  /// Throw on every rank as soon as one has no more data.
  bool throw_on_early_termination = false;
};

/// While it lives, backward leaves gradients as this rank computed them; they
/// add up, and the first backward after it reduces the sum. What counts is
/// where backward runs. Every rank does the same.
class NoSync {
 public:
  explicit NoSync(std::shared_ptr<GradientReducer> reducer);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::shared_ptr<GradientReducer> reducer_;
  bool was_enabled_ = false;
};

/// All of it that does not depend on the module's type.
class DataParallelModule {
 public:
  DataParallelModule(
      torch::nn::Module& module, Group group,
      DistributedDataParallelOptions options);
  ~DataParallelModule();
  DataParallelModule(const DataParallelModule&) = delete;
  DataParallelModule& operator=(const DataParallelModule&) = delete;

  const Group& group() const;

  [[nodiscard]] NoSync no_sync();

  /// For loops that run backward in several passes themselves, as a pipeline
  /// does: under no_sync() for all of the step, begin_reduction() before the
  /// passes that complete the gradients, finish_reduction() after them. Each
  /// gradient is reduced as soon as autograd has accumulated it. sync_buffers()
  /// before the step's first forward: every rank takes rank 0's buffers.
  void begin_reduction();
  void finish_reduction();
  void sync_buffers();

  /// For batches of different size. `loss_sum` is the sum (not the mean) of the
  /// losses of this rank's samples, `local_count` how many samples this rank
  /// has in the whole optimizer step: n_r. Returns
  ///
  ///   loss_sum * divisor / (n_0 + n_1 + …)
  ///
  /// where divisor is what the sum of gradients is divided by (the group's
  /// size). Backward through it, on every rank, leaves the gradient of the mean
  /// loss over the global batch. With accumulation every microbatch passes the
  /// same local_count, that of the step, and the microbatches' losses add up.
  /// One small all_reduce. Throws DataError when no rank has a sample.
  torch::Tensor global_mean(const torch::Tensor& loss_sum, int64_t local_count);

  /// Runs `body`, this rank's loop over its batches, which may be shorter or
  /// longer than the other ranks'. Each iteration does the same on every rank
  /// (forward, global_mean if used, backward). A rank whose body has returned
  /// takes part in the others' collectives with zeros until all have ended;
  /// then every rank takes the parameters and buffers of one that ended last.
  /// Optimizer state is not exchanged. Exceptions of `body` pass through.
  /// Collectives that the body makes itself, those of SyncBatchNorm among them,
  /// are not shadowed: with those, ranks need the same number of iterations.
  void join(const std::function<void()>& body, const JoinOptions& options = {});

  /// Every rank takes parameters and buffers of group rank `source`; done once
  /// by the constructor, from rank 0.
  void broadcast_state(int source = 0);

  /// Names of the parameters by bucket, in the order that they are reduced.
  std::vector<std::vector<std::string>> buckets() const;

 protected:
  void before_forward();
  bool watches() const { return reducer_ != nullptr; }
  void watch(const torch::Tensor& output) { reducer_->watch(output); }
  void watch(const std::optional<torch::Tensor>& output) {
    if (output) watch(*output);
  }
  template <class T>
  void watch(const std::vector<T>& outputs) {
    for (const auto& output : outputs) watch(output);
  }
  template <class T, size_t N>
  void watch(const std::array<T, N>& outputs) {
    for (const auto& output : outputs) watch(output);
  }
  template <class K, class T>
  void watch(const std::map<K, T>& outputs) {
    for (const auto& [_, output] : outputs) watch(output);
  }
  template <class A, class B>
  void watch(const std::pair<A, B>& outputs) {
    watch(outputs.first);
    watch(outputs.second);
  }
  template <class... T>
  void watch(const std::tuple<T...>& outputs) {
    std::apply([this](const auto&... each) { (watch(each), ...); }, outputs);
  }
  // Other types are not looked into: their backward begins at the first
  // parameter that it reaches.
  template <class T>
  requires(!std::is_convertible_v<const T&, torch::Tensor>) void watch(
      const T&) {}

 private:
  struct Join;

  std::vector<int64_t> announce(int64_t event);
  void shadow_until_all_ended();
  int64_t divisor_of(int64_t num_active) const;

  torch::nn::Module& module_;
  Group group_;
  DistributedDataParallelOptions options_;
  std::shared_ptr<GradientReducer> reducer_;  // null in a group of size 1
  std::unique_ptr<Join> join_;                // while join() runs
  std::vector<NamedParameter> frozen_;        // when the wrapper was built
  ConvertedBatchNorms converted_;
};

/// A module itself, not a holder or pointer of one.
template <class M>
concept ModuleClass = std::is_base_of_v<torch::nn::Module, M>;

/// Wraps any module: M is a module holder (TORCH_MODULE), a shared_ptr to a
/// module, or the module's class itself, held by reference.
///
/// Every rank of the group constructs one around the same model. The
/// constructor compares names, shapes and dtypes of parameters and buffers
/// across ranks (ConfigError names the first difference and the ranks) and then
/// broadcasts rank 0's values. Parameters are those that require grad now: what
/// is to be trained later must not be frozen yet (ConfigError at the next
/// forward); what is frozen later, on every rank, takes no part. The module
/// stays usable by itself, for evaluation or saving; optimizers take its
/// parameters. Keep the wrapper as long as backward should reduce.
///
/// forward takes and returns what the module's forward does. Call it by the
/// wrapper in training: the buffers are broadcast there.
///
/// Errors leave backward(): ConfigError when a parameter got no gradient
/// (unless find_unused_parameters), CommError when a peer is lost. In a group
/// of size 1 the wrapper does nothing.
template <class M>
class DistributedDataParallel : public DataParallelModule {
 public:
  explicit DistributedDataParallel(
      M module, Group group,
      DistributedDataParallelOptions options = {}) requires(!ModuleClass<M>)
      : DataParallelModule(
            *module_pointer(module), std::move(group), std::move(options)),
        module_(std::move(module)) {}
  explicit DistributedDataParallel(
      M& module, Group group,
      DistributedDataParallelOptions options = {}) requires ModuleClass<M>
      : DataParallelModule(module, std::move(group), std::move(options)),
        module_(&module) {}

  template <class... Args>
  auto forward(Args&&... args) {
    before_forward();
    auto output = module_->forward(std::forward<Args>(args)...);
    if (watches()) watch(output);
    return output;
  }
  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  auto* operator->() const { return &*module_pointer(module_); }

 private:
  using Stored = std::conditional_t<ModuleClass<M>, M*, M>;

  template <class Holder>
  static auto module_pointer(const Holder& holder) {
    if constexpr (requires { holder.ptr(); }) {
      return holder.ptr();
    } else {
      return holder;
    }
  }

  Stored module_;
};

}  // namespace echelon
