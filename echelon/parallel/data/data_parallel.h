// Data parallelism within one process: one thread and one replica of the model
// per device. It gives the same results as one device and needs no launcher.
//
//   DataParallel<Net> parallel(net, {.devices = {torch::kCPU, torch::kCPU}});
//   std::vector<std::unique_ptr<torch::optim::SGD>> sgd(parallel.size());
//   parallel.run([&](auto& replica) {
//     sgd[replica.index] = std::make_unique<torch::optim::SGD>(
//         replica.module->parameters(), 0.1);
//   });
//   for (…) {
//     const double loss = parallel.step({x, y}, [](auto& net, auto& batch) {
//       return cross_entropy_sum(net(batch[0]), batch[1]);
//     });
//     parallel.run([&](auto& replica) {
//       sgd[replica.index]->step();
//       sgd[replica.index]->zero_grad();
//     });
//   }
//
// Replicas persist. Each has its own parameters and optimizer, which stay equal
// because they get the same gradients.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>

#include "echelon/comm/world.h"
#include "echelon/options/comm.h"
#include "echelon/parallel/data/distributed_data_parallel.h"

namespace echelon {

struct DataParallelOptions {
  /// One replica per entry. The CPU may occur several times, a GPU once.
  std::vector<torch::Device> devices = {torch::kCPU, torch::kCPU};
  /// The share of the batch that each replica takes, relative to the others, so
  /// that a slow device gets less; empty: equal shares.
  std::vector<double> shares;
  /// Compute threads of each replica; 0: the cores, shared evenly.
  int64_t threads = 0;
  DistributedDataParallelOptions ddp;
  CommOptions comm;
};

/// Samples of each replica: splits `total` in proportion to `shares`, in order.
/// Each boundary is rounded to the nearest sample.
std::vector<int64_t>
split_by_shares(int64_t total, const std::vector<double>& shares);

namespace detail {

void check_options(const DataParallelOptions& options);
/// A copy of `module` on `device`; ConfigError when it has no clone().
std::shared_ptr<torch::nn::Module>
clone_to(const torch::nn::Module& module, torch::Device device);

}  // namespace detail

/// Threads of this process that are the ranks of a world of their own.
class ReplicaThreads {
 public:
  /// `threads`: compute threads of each rank; 0 shares the cores evenly.
  /// `release(rank)` drops what the owner holds of a rank that failed, so that
  /// its groups end and the other ranks do not wait for it.
  ReplicaThreads(
      int num_ranks, int64_t threads, const CommOptions& options,
      std::function<void(int)> release);
  /// Ends the threads. No run() may be in progress.
  ~ReplicaThreads();
  ReplicaThreads(const ReplicaThreads&) = delete;
  ReplicaThreads& operator=(const ReplicaThreads&) = delete;

  /// Runs `body` on every thread with its World, and returns when all are done.
  /// Grad mode and autocast are those of the caller. Rethrows the first error;
  /// later calls throw it again, since the ranks no longer agree. One caller at
  /// a time.
  void run(const std::function<void(World&)>& body);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// What the body of DataParallel::run works on.
template <class M>
struct Replica {
  int index = 0;
  torch::Device device = torch::kCPU;
  M module;
  /// Call it in training instead of the module: its gradients are averaged.
  DistributedDataParallel<M>& ddp;
  World& world;
};

/// M is a module holder (TORCH_MODULE) or a shared_ptr to a module. Not
/// thread-safe, not movable. Throws ConfigError for options that do not fit.
/// The first error of a replica is rethrown to the caller; after it the object
/// can only be destroyed.
template <class M>
class DataParallel {
 public:
  /// `module` becomes replica 0 and moves to its device. The others are clones,
  /// so it must derive from torch::nn::Cloneable or override clone().
  explicit DataParallel(M module, DataParallelOptions options = {})
      : options_(std::move(options)) {
    start([&](int index) {
      if (index == 0) return module;
      return holder_of(detail::clone_to(*module, options_.devices[index]));
    });
  }
  /// For modules that cannot be cloned: calls `make` once per replica. All take
  /// the values of the first.
  template <class Make>
  requires(
      !std::is_same_v<std::remove_cvref_t<Make>, M> &&
      std::is_invocable_r_v<
          M,
          Make&>) explicit DataParallel(Make&& make, DataParallelOptions options = {})
      : options_(std::move(options)) {
    start([&](int) { return make(); });
  }

  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;

  int size() const { return static_cast<int>(options_.devices.size()); }
  /// Replica 0, for evaluation and saving.
  const M& module() const { return modules_[0]; }

  /// Runs `body(Replica<M>&)` on every replica's thread at the same time. All
  /// replicas call a collective of replica.world, or none.
  template <class Body>
  void run(Body&& body) {
    threads_->run([&](World& world) {
      const int index = world.rank();
      Replica<M> replica{
          index, options_.devices[index], modules_[index], *ddp_[index], world};
      body(replica);
    });
  }

  /// One forward and backward of the whole batch; returns the mean loss. The
  /// tensors of `batch` are split along dim 0 by the shares. `loss_sum(ddp,
  /// slices)` returns the sum of the losses of its samples. Adds the gradient
  /// of the mean over the batch to the gradients of every replica.
  template <class LossSum>
  double step(const std::vector<torch::Tensor>& batch, LossSum&& loss_sum) {
    const auto sizes = sizes_of(batch.at(0));
    std::vector<double> losses(size());
    run([&](Replica<M>& replica) {
      const auto slices =
          slice_of_batch(batch, sizes, replica.index, replica.device);
      const torch::Tensor mean = replica.ddp.global_mean(
          loss_sum(replica.ddp, slices), sizes[replica.index]);
      mean.backward();
      losses[replica.index] = mean.template item<double>();
    });
    return std::accumulate(losses.begin(), losses.end(), 0.0) / size();
  }

  /// The outputs for the whole batch, on replica 0's device, without gradients.
  torch::Tensor forward(const torch::Tensor& input) {
    const auto sizes = sizes_of(input);
    std::vector<torch::Tensor> outputs(size());
    run([&](Replica<M>& replica) {
      const torch::NoGradGuard no_grad;
      const auto slices =
          slice_of_batch({input}, sizes, replica.index, replica.device);
      outputs[replica.index] =
          replica.module->forward(slices[0]).to(options_.devices[0]);
    });
    return torch::cat(outputs);
  }

 private:
  template <class Make>
  void start(const Make& make) {
    detail::check_options(options_);
    for (int index = 0; index < size(); ++index) {
      modules_.push_back(make(index));
      modules_[index]->to(options_.devices[index]);
    }
    ddp_.resize(size());
    threads_ = std::make_unique<ReplicaThreads>(
        size(), options_.threads, options_.comm,
        [this](int index) { ddp_[index].reset(); });
    threads_->run([&](World& world) {
      const int index = world.rank();
      ddp_[index] = std::make_unique<DistributedDataParallel<M>>(
          modules_[index], world.group(), options_.ddp);
    });
  }

  static M holder_of(std::shared_ptr<torch::nn::Module> clone) {
    if constexpr (requires { typename M::ContainedType; }) {
      return M(std::dynamic_pointer_cast<typename M::ContainedType>(clone));
    } else {
      return std::dynamic_pointer_cast<typename M::element_type>(clone);
    }
  }

  std::vector<int64_t> sizes_of(const torch::Tensor& first) const {
    auto shares = options_.shares;
    if (shares.empty()) shares.assign(size(), 1.0);
    return split_by_shares(first.size(0), shares);
  }

  static std::vector<torch::Tensor> slice_of_batch(
      const std::vector<torch::Tensor>& batch,
      const std::vector<int64_t>& sizes, int index, torch::Device device) {
    const int64_t begin =
        std::accumulate(sizes.begin(), sizes.begin() + index, int64_t{0});
    std::vector<torch::Tensor> slices;
    for (const auto& tensor : batch) {
      slices.push_back(tensor.narrow(0, begin, sizes[index]).to(device));
    }
    return slices;
  }

  DataParallelOptions options_;
  std::vector<M> modules_;
  std::unique_ptr<ReplicaThreads>
      threads_;  // outlives ddp_, which holds its groups
  std::vector<std::unique_ptr<DistributedDataParallel<M>>> ddp_;
};

}  // namespace echelon
