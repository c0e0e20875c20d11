#include "echelon/comm/local/work.h"

#include <ATen/core/jit_type.h>

#include "echelon/comm/shared_memory/failure.h"
#include "echelon/text/format.h"

namespace echelon::local {

LocalWork::LocalWork(
    int rank, c10d::OpType type, std::vector<at::Tensor> results)
    : Work(rank, type),
      results_(std::move(results)),
      future_(c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()))) {}

void LocalWork::end(std::exception_ptr error) {
  std::lock_guard lock(mutex_);
  ended_ = true;
  error_ = error;
}

void LocalWork::notify() {
  if (error_ != nullptr) {
    future_->setError(error_);
  } else {
    future_->markCompleted(c10::IValue(results_));
  }
}

bool LocalWork::isCompleted() {
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
          format(
              "[local] {} #{} is not done after {} ms of wait(); it continues "
              "until its own deadline",
              operation->name, operation->sequence, timeout.count()),
          operation->sequence, {});
    }
  }
  if (auto error = exception()) {
    std::rethrow_exception(error);
  }
  return true;
}

}  // namespace echelon::local
