#include "echelon/checkpoint/files/write_behind.h"

#include <algorithm>
#include <cstring>

namespace echelon {

WriteBehind::WriteBehind(NewFile& file, uint64_t bytes)
    : file_(file),
      buffer_bytes_(
          static_cast<size_t>(std::min<uint64_t>(bytes, kBufferBytes))) {}

WriteBehind::~WriteBehind() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void WriteBehind::append(std::span<const std::byte> data) {
  while (!data.empty()) {
    if (filled_ == buffer_bytes_) hand_over();
    Memory& own = memory_[filling_];
    if (!own) own.reset(new (kAlign) std::byte[buffer_bytes_]);
    const auto piece =
        data.first(std::min(data.size(), buffer_bytes_ - filled_));
    std::memcpy(own.get() + filled_, piece.data(), piece.size());
    filled_ += piece.size();
    data = data.subspan(piece.size());
  }
}

/// Waits until the buffer before is written.
void WriteBehind::hand_over() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return full_.empty(); });
  if (error_) std::rethrow_exception(error_);
  full_ = {memory_[filling_].get(), filled_};
  if (!thread_.joinable()) thread_ = std::thread([this] { write_all(); });
  changed_.notify_all();
  filling_ = 1 - filling_;
  filled_ = 0;
}

void WriteBehind::finish() {
  if (!thread_.joinable()) {
    if (filled_ > 0) file_.append(memory_[filling_].get(), filled_);
    return;
  }
  if (filled_ > 0) hand_over();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return full_.empty(); });
  if (error_) std::rethrow_exception(error_);
}

void WriteBehind::write_all() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !full_.empty() || ended_; });
    if (full_.empty()) return;
    lock.unlock();
    std::exception_ptr error;
    try {
      write(full_);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    error_ = error;
    full_ = {};
    changed_.notify_all();
    if (error) return;
  }
}

void WriteBehind::write(std::span<const std::byte> buffer) {
  if (buffer.size() % NewFile::kDirectBytes == 0) {
    file_.append_direct(buffer.data(), buffer.size());
  } else {
    file_.append(buffer.data(), buffer.size());
  }
  file_.start_writing();
}

}  // namespace echelon
