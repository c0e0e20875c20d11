// The handle of a call of the local backend.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
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
  /// Who asks for it waits without wait(): the operations hurry from now on.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override;

  /// Before anyone else has the work.
  void add(OperationPtr operation) {
    operations_.push_back(std::move(operation));
  }
  const std::vector<OperationPtr>& operations() const { return operations_; }
  /// The operation's last acts: it is over, with its results in place or with
  /// an error; then who waits for that without wait() is told.
  void end(std::exception_ptr error);
  void tell();
  /// Calls with the error, or null, once it has ended; at once if it has. The
  /// same as a callback of the future, for who does not wait for it.
  void on_end(std::function<void(std::exception_ptr)> call);

 private:
  std::vector<OperationPtr> operations_;
  mutable std::mutex mutex_;
  bool ended_ = false;
  std::exception_ptr error_;
  std::vector<std::function<void(std::exception_ptr)>>
      calls_;  // until it has ended
  std::vector<at::Tensor> results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace echelon::local
