// A backend around a backend: records every collective, says on every rank who
// did not come, and compares the ranks' calls when asked to.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "echelon/comm/observer.h"

namespace echelon {

struct ObservedBackendOptions {
  ObservedGroup group;
  /// Compare the calls of all ranks through `store` before each one.
  bool check = false;
  c10::intrusive_ptr<c10d::Store> store;
  std::chrono::milliseconds timeout;
  /// Whether the inner backend completes the futures of its work when the work
  /// is done (NCCL completes them when it is queued).
  bool futures_mean_done = true;
};

/// Everything that c10d's reducer and Group call; nothing else is forwarded.
class ObservedBackend : public c10d::Backend {
 public:
  ObservedBackend(
      c10::intrusive_ptr<c10d::Backend> inner,
      std::shared_ptr<Observer> observer, ObservedBackendOptions options);

  const std::string getBackendName() const override {
    return inner_->getBackendName();
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    inner_->setTimeout(timeout);
  }
  bool supportsCoalescing() const override {
    return inner_->supportsCoalescing();
  }
  void startCoalescing() override { inner_->startCoalescing(); }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    return inner_->endCoalescing();
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return inner_->getBackendOptions();
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  c10d::ErrorType getError() override { return inner_->getError(); }
  void abort() override { inner_->abort(); }
  void shutdown() override { inner_->shutdown(); }

  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  WorkPtr
  broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr
  allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(
      Tensors& tensors,
      const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(
      std::vector<Tensors>& outputs, Tensors& inputs,
      const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs,
      const c10d::AllgatherOptions& options) override;
  WorkPtr gather(
      std::vector<Tensors>& outputs, Tensors& inputs,
      const c10d::GatherOptions& options) override;
  WorkPtr scatter(
      Tensors& outputs, std::vector<Tensors>& inputs,
      const c10d::ScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs,
      const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input,
      std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

 private:
  /// Runs one call of the inner backend: record, compare, forward, watch.
  /// `detail` is what must agree beyond operation, shape and dtype.
  WorkPtr observe(
      const char* operation, const at::Tensor& tensor,
      const std::string& detail, bool async,
      const std::function<WorkPtr()>& call, bool collective = true);
  void compare(const ObservedCall& call, const std::string& detail);

  c10::intrusive_ptr<c10d::Backend> inner_;
  std::shared_ptr<Observer> observer_;
  ObservedBackendOptions options_;
  uint64_t sequence_ = 0;       // collectives begun
  uint64_t peer_sequence_ = 0;  // sends and receives begun
};

}  // namespace echelon
