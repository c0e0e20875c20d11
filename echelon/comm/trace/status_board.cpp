#include "echelon/comm/trace/status_board.h"

#include <algorithm>
#include <cstring>

namespace echelon {
namespace {

template <size_t N>
void copy_text(std::array<char, N>& to, const std::string& from) {
  const size_t length = std::min(from.size(), N - 1);
  std::memcpy(to.data(), from.data(), length);
  std::memset(to.data() + length, 0, N - length);
}

}  // namespace

void StatusEntry::set(
    uint64_t sequence_, const std::string& operation_, const std::string& axis_,
    const std::string& label_) {
  sequence = sequence_;
  copy_text(operation, operation_);
  copy_text(axis, axis_);
  copy_text(label, label_);
}

std::string StatusEntry::describe() const {
  std::string text(operation.data());
  if (label[0] != 0) text += " \"" + std::string(label.data()) + "\"";
  return text + " (#" + std::to_string(sequence) + ")";
}

void MemoryBoard::publish(int rank, const RankStatus& status) {
  std::lock_guard lock(mutex_);
  slots_[static_cast<size_t>(rank)] = status;
}

std::optional<RankStatus> MemoryBoard::read(int rank) {
  std::lock_guard lock(mutex_);
  return slots_[static_cast<size_t>(rank)];
}

std::string to_bytes(const RankStatus& status) {
  static_assert(std::is_trivially_copyable_v<RankStatus>);
  return {reinterpret_cast<const char*>(&status), sizeof(status)};
}

std::optional<RankStatus> status_from_bytes(const std::string& bytes) {
  if (bytes.size() < sizeof(RankStatus)) return std::nullopt;
  RankStatus status;
  std::memcpy(&status, bytes.data(), sizeof(status));
  return status;
}

}  // namespace echelon
