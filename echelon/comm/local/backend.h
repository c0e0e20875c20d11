// c10d's interface to a Communicator.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "echelon/comm/shared_memory/communicator.h"

namespace echelon::local {

class LocalWork;

/// A tensor of a call, and the contiguous host memory that stands for it while
/// the operation runs: the tensor itself where that is possible.
struct Staged {
  at::Tensor tensor;
  at::Tensor host;
  bool copy_back = false;

  char* data() const { return static_cast<char*>(host.data_ptr()); }
};

class LocalBackend : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  explicit LocalBackend(
      std::shared_ptr<Communicator> group, std::chrono::milliseconds timeout);
  ~LocalBackend() override;

  const std::string getBackendName() const override { return "local"; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

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
  WorkPtr allgather_coalesced(
      std::vector<Tensors>& outputs, Tensors& inputs,
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
  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs,
      const c10d::ReduceScatterOptions& options) override;
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
  WorkPtr alltoall(
      Tensors& outputs, Tensors& inputs,
      const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(
      const c10d::BarrierOptions& options, bool wait_all_ranks) override;

  uint64_t getSequenceNumberForGroup() override;
  void setSequenceNumberForGroup() override {}  // counted from 0 on every rank
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& options) override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

 private:
  WorkPtr issue(
      c10d::OpType type, Tensors results, std::vector<Staged> staged,
      bool async, std::chrono::milliseconds timeout,
      const std::function<OperationPtr(Issue)>& call,
      std::function<void()> finish = nullptr);
  void check_rank(const char* operation, const char* what, int64_t rank) const;

  std::shared_ptr<Communicator> group_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<std::atomic<int>> pending_;
  bool coalescing_ = false;
  std::vector<c10::intrusive_ptr<LocalWork>> coalesced_;
};

}  // namespace echelon::local
