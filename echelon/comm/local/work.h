// The handle of a call of the local backend.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <mutex>
#include <vector>

#include "echelon/comm/shared_memory/engine.h"

namespace echelon::local {

/// One operation, or several that were coalesced.
class LocalWork : public c10d::Work {
 public:
  LocalWork(int rank, c10d::OpType type, std::vector<at::Tensor> results);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return results_; }
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }
  uint64_t getSequencenumber() const override;

  /// Called before anyone else has the work.
  void add(OperationPtr operation) {
    operations_.push_back(std::move(operation));
  }
  const std::vector<OperationPtr>& operations() const { return operations_; }
  /// The work is over: its results are in place, or `error` is set.
  void end(std::exception_ptr error);
  /// Completes the future; after end().
  void notify();

 private:
  std::vector<OperationPtr> operations_;
  mutable std::mutex mutex_;
  bool ended_ = false;
  std::exception_ptr error_;
  std::vector<at::Tensor> results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace echelon::local
