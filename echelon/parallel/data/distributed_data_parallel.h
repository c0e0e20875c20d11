// Data parallelism: every rank holds the whole model and computes on its share
// of the batch. backward leaves the mean of the gradients on all ranks.
//
//   DistributedDataParallel<Net> ddp(net, world.group());
//   auto loss = cross_entropy(ddp(x), y);
//   loss.backward();        // gradients are averaged while this runs
//   optimizer.step();       // over net->parameters(), the same on every rank
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
#include "echelon/parallel/data/communication_hooks.h"
#include "echelon/parallel/data/gradient_reducer.h"
#include "echelon/parallel/data/sync_batch_norm.h"

namespace echelon {

struct JoinOptions {
  /// Once ranks have run out of data, still divide gradients by the group's
  /// size (a joined rank's batch counts as zeros). False: divide by the number
  /// of ranks that still have data.
  bool divide_by_initial_size = true;
  /// Throw on every rank as soon as one has no more data.
  bool throw_on_early_termination = false;
};

/// All of DistributedDataParallel that does not depend on the module's type.
class DataParallelModule {
 public:
  DataParallelModule(
      torch::nn::Module& module, Group group,
      DistributedDataParallelOptions options);
  ~DataParallelModule();
  DataParallelModule(const DataParallelModule&) = delete;
  DataParallelModule& operator=(const DataParallelModule&) = delete;

  const Group& group() const;

  /// While the result lives, backward does not communicate: gradients of this
  /// rank add up, and the first backward after it reduces the sum. What counts
  /// is where backward runs. Every rank does the same.
  [[nodiscard]] std::shared_ptr<void> no_sync();

  /// For loops that run several backward passes themselves, as a pipeline does.
  /// Hold no_sync() during the whole step, call begin_reduction() before the
  /// passes that complete the gradients, and finish_reduction() after them.
  /// Each gradient is reduced as soon as autograd has accumulated it. Call
  /// sync_buffers() before the step's first forward to broadcast rank 0's
  /// buffers.
  void begin_reduction();
  void finish_reduction();
  void sync_buffers();

  /// For ranks with batches of different size. `loss_sum` is the sum (not the
  /// mean) of the losses of this rank's samples, and `local_count` = n_r the
  /// number of samples of this rank in the whole optimizer step. Returns
  ///
  ///   loss_sum * divisor / (n_0 + n_1 + …)
  ///
  /// where `divisor` is what the sum of gradients is divided by (the group's
  /// size). Backward through the result, on every rank, leaves the gradient of
  /// the mean loss over the global batch. With gradient accumulation every
  /// microbatch passes the same local_count, that of the step, and the losses
  /// add up. Costs one small all_reduce. Throws DataError when no rank has a
  /// sample.
  torch::Tensor global_mean(const torch::Tensor& loss_sum, int64_t local_count);

  /// Runs `body`, this rank's loop over its batches, which may have fewer or
  /// more iterations than on other ranks. Each iteration makes the same calls
  /// on every rank (forward, global_mean if used, backward). A rank whose body
  /// has returned joins the collectives of the others with zeros until all have
  /// ended; then every rank takes the parameters and buffers of a rank that
  /// ended last.
  ///
  /// Optimizer state is not exchanged. Exceptions of `body` pass through. A
  /// joined rank does not shadow collectives that the body calls itself, such
  /// as those of SyncBatchNorm: with these, all ranks need the same number of
  /// iterations.
  void join(const std::function<void()>& body, const JoinOptions& options = {});

  /// Broadcasts parameters and buffers of group rank `source`, as the
  /// constructor does from rank 0.
  void broadcast_state(int source = 0);

  /// Names of the parameters by bucket, in the order of reduction.
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
    std::apply([&](const auto&... each) { (watch(each), ...); }, outputs);
  }
  // Other types are not searched for tensors: their reduction begins when
  // backward reaches the first parameter.
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
  std::vector<NamedParameter> frozen_;        // at construction
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
/// across ranks (a ConfigError names the first difference and the ranks), then
/// broadcasts rank 0's values.
///
/// The wrapper reduces the parameters that require grad at construction. One
/// that is unfrozen later needs a new wrapper (ConfigError at the next
/// forward); one that is frozen later, on every rank, is left out. The module
/// stays usable by itself, for evaluation or saving, and optimizers take its
/// parameters. Keep the wrapper alive as long as backward should reduce.
///
/// forward takes and returns what the module's forward does. In training call
/// it through the wrapper, which broadcasts the buffers.
///
/// backward() throws ConfigError when a parameter got no gradient (unless
/// find_unused_parameters), and CommError when a peer is lost. In a group of
/// size 1 the wrapper does nothing.
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

template <class M>
DistributedDataParallel(M, Group, DistributedDataParallelOptions = {})
    -> DistributedDataParallel<M>;

}  // namespace echelon
