#include "echelon/comm/local/work.h"

#include <ATen/core/jit_type.h>

#include <utility>

#include "echelon/comm/shared_memory/failure.h"

namespace echelon::local {

LocalWork::LocalWork(
    int rank, c10d::OpType type, std::vector<at::Tensor> results)
    : Work(rank, type),
      results_(std::move(results)),
      future_(c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()))) {}

c10::intrusive_ptr<c10::ivalue::Future> LocalWork::getFuture() {
  for (const auto& operation : operations_) {
    operation->hurry();
  }
  return future_;
}

void LocalWork::on_end(std::function<void(std::exception_ptr)> call) {
  {
    std::lock_guard lock(mutex_);
    if (!ended_) {
      calls_.push_back(std::move(call));
      return;
    }
  }
  call(error_);
}

void LocalWork::end(std::exception_ptr error) {
  std::lock_guard lock(mutex_);
  ended_ = true;
  error_ = error;
}

void LocalWork::tell() {
  for (const auto& call : std::exchange(calls_, {})) {
    call(error_);
  }
  if (error_ != nullptr) {
    future_->setError(error_);
  } else {
    future_->markCompleted(c10::IValue(results_));
  }
}

bool LocalWork::isCompleted() {
  for (const auto& operation : operations_) {
    operation->test();
  }
  std::lock_guard lock(mutex_);
  return ended_;
}

std::exception_ptr LocalWork::exception() const {
  std::lock_guard lock(mutex_);
  return error_;
}

bool LocalWork::isSuccess() const {
  std::lock_guard lock(mutex_);
  return ended_ && error_ == nullptr;
}

int LocalWork::sourceRank() const {
  return operations_.empty() ? -1 : operations_.front()->source.load();
}

uint64_t LocalWork::getSequencenumber() const {
  return operations_.empty() ? 0 : operations_.front()->sequence;
}

bool LocalWork::wait(std::chrono::milliseconds timeout) {
  for (const auto& operation : operations_) {
    if (!operation->wait(timeout)) {
      throw Timeout(
          std::string("[local] ") + operation->name + " #" +
              std::to_string(operation->sequence) + " is not done after " +
              std::to_string(timeout.count()) +
              " ms of wait(); it goes on until its own deadline",
          operation->sequence, {});
    }
  }
  if (auto error = exception()) {
    std::rethrow_exception(error);
  }
  return true;
}

}  // namespace echelon::local
