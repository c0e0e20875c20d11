// Data parallelism inside of one process: a thread and a replica of the model
// per device. The same results as one device; no launcher.
//
//   DataParallel<Net> parallel(net, {.devices = {torch::kCPU, torch::kCPU}});
//   std::vector<std::unique_ptr<torch::optim::SGD>> sgd(parallel.size());
//   parallel.run([&](auto& replica) {
//     sgd[replica.index] = std::make_unique<torch::optim::SGD>(
//         replica.module->parameters(), 0.1);
//   });
//   for (…) {
//     const double loss = parallel.step({x, y}, [](auto& net, auto& part) {
//       return cross_entropy_sum(net(part[0]), part[1]);
//     });
//     parallel.run([&](auto& replica) {
//       sgd[replica.index]->step();
//       sgd[replica.index]->zero_grad();
//     });
//   }
//
// Replicas persist: each has its own parameters and optimizer, which stay equal
// because they get the same gradients.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "echelon/options/comm.h"
#include "echelon/parallel/data/distributed_data_parallel.h"
#include "echelon/parallel/data/replica_threads.h"

namespace echelon {

struct DataParallelOptions {
  /// One replica each. The CPU may come several times, a GPU once.
  std::vector<torch::Device> devices = {torch::kCPU, torch::kCPU};
  /// How large a part of the batch each replica takes, relative to the others;
  /// empty: the same. A slow device gets less.
  std::vector<double> shares;
  /// Compute threads of each replica; 0: the cores, shared evenly.
  int64_t threads = 0;
  DistributedDataParallelOptions ddp;
  CommOptions comm;
};

/// Samples of each replica: `total` cut in proportion to `shares`, in order, so
/// that each bound is the nearest to its exact place.
std::vector<int64_t>
split_by_shares(int64_t total, const std::vector<double>& shares);

namespace detail {

void check_options(const DataParallelOptions& options);
/// A copy of `module` on `device`; ConfigError when it has no clone().
std::shared_ptr<torch::nn::Module>
clone_to(const torch::nn::Module& module, torch::Device device);

}  // namespace detail

/// What a thread works on.
template <class M>
struct Replica {
  int index = 0;
  torch::Device device = torch::kCPU;
  M module;
  /// Called in training instead of the module; its gradients are averaged.
  DistributedDataParallel<M>& ddp;
  World& world;
};

/// M is a module holder (TORCH_MODULE) or a shared_ptr to a module.
/// Not thread-safe; stays where it is. The first error of a replica is thrown
/// to the caller as it is, after which the object can only be destroyed.
template <class M>
class DataParallel {
 public:
  /// `module` becomes replica 0 (and moves to its device); the others are its
  /// clones, for which it derives from torch::nn::Cloneable or overrides
  /// clone().
  explicit DataParallel(M module, DataParallelOptions options = {})
      : options_(std::move(options)) {
    start([&](int index) {
      if (index == 0) return module;
      return of(detail::clone_to(*module, options_.devices[index]));
    });
  }
  /// For modules that cannot be cloned: `make` is called once per replica; all
  /// take the values of the first.
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

  /// `body(Replica<M>&)` on every replica's thread at once. Collectives of
  /// replica.world are called by all or none.
  template <class Body>
  void run(Body&& body) {
    threads_->run([&](World& world) {
      const int index = world.rank();
      Replica<M> replica{
          index, options_.devices[index], modules_[index], *ddp_[index], world};
      body(replica);
    });
  }

  /// One forward and backward of the whole batch. The tensors of `batch` are
  /// cut along dim 0 by the shares; `loss_sum(ddp, parts)` returns the sum of
  /// the losses of its part's samples. Leaves on every replica the gradient of
  /// the mean over the batch, added to what was there. Returns that mean.
  template <class LossSum>
  double step(const std::vector<torch::Tensor>& batch, LossSum&& loss_sum) {
    const auto sizes = sizes_of(batch.at(0));
    std::vector<double> losses(size());
    run([&](Replica<M>& replica) {
      const auto parts = part_of(batch, sizes, replica.index, replica.device);
      const torch::Tensor mean = replica.ddp.global_mean(
          loss_sum(replica.ddp, parts), sizes[replica.index]);
      mean.backward();
      losses[replica.index] = mean.template item<double>();
    });
    double sum = 0;
    for (const double loss : losses) sum += loss;
    return sum / size();
  }

  /// The outputs for the whole batch, on replica 0's device. Without gradients:
  /// train by step().
  torch::Tensor forward(const torch::Tensor& input) {
    const auto sizes = sizes_of(input);
    std::vector<torch::Tensor> outputs(size());
    run([&](Replica<M>& replica) {
      const torch::NoGradGuard no_grad;
      const auto parts = part_of({input}, sizes, replica.index, replica.device);
      outputs[replica.index] =
          replica.module->forward(parts[0]).to(options_.devices[0]);
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

  static M of(std::shared_ptr<torch::nn::Module> clone) {
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

  static std::vector<torch::Tensor> part_of(
      const std::vector<torch::Tensor>& batch,
      const std::vector<int64_t>& sizes, int index, torch::Device device) {
    int64_t begin = 0;
    for (int i = 0; i < index; ++i) begin += sizes[i];
    std::vector<torch::Tensor> parts;
    for (const auto& tensor : batch) {
      parts.push_back(tensor.narrow(0, begin, sizes[index]).to(device));
    }
    return parts;
  }

  DataParallelOptions options_;
  std::vector<M> modules_;
  std::unique_ptr<ReplicaThreads> threads_;  // outlives what holds its groups
  std::vector<std::unique_ptr<DistributedDataParallel<M>>> ddp_;
};

}  // namespace echelon
