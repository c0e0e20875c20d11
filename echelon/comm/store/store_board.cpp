#include "echelon/comm/store/store_board.h"

#include <chrono>
#include <exception>

namespace echelon {
namespace {

std::string key_of(int rank) {
  return "status/" + std::to_string(rank);
}

}  // namespace

StoreBoard::StoreBoard(c10::intrusive_ptr<c10d::Store> store)
    : store_(std::move(store)), thread_([this] { run(); }) {}

StoreBoard::~StoreBoard() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void StoreBoard::publish(int rank, const RankStatus& status) {
  std::lock_guard lock(mutex_);
  rank_ = rank;
  status_ = status;
  changed_ = true;
}

std::optional<RankStatus> StoreBoard::read(int rank) {
  try {
    if (!store_->check({key_of(rank)})) return std::nullopt;
    return status_from_bytes(store_->get_to_str(key_of(rank)));
  } catch (const std::exception&) {
    return std::nullopt;  // the store is gone: there is nothing to tell
  }
}

void StoreBoard::run() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    wake_.wait_for(lock, std::chrono::milliseconds(500));
    if (!changed_) continue;
    changed_ = false;
    const std::string bytes = to_bytes(status_);
    const std::string key = key_of(rank_);
    lock.unlock();
    try {
      store_->set(key, bytes);
    } catch (const std::exception&) {
      return;  // the job is ending
    }
    lock.lock();
  }
}

}  // namespace echelon
