// The handle of a call of the local backend.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <vector>

#include "echelon/comm/local/engine.h"

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

  /// Before anyone else has the work.
  void add(OperationPtr operation) {
    operations_.push_back(std::move(operation));
  }
  const std::vector<OperationPtr>& operations() const { return operations_; }
  /// The operation's last act.
  void finish(std::exception_ptr error);

 private:
  std::vector<OperationPtr> operations_;
  std::vector<at::Tensor> results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace echelon::local
