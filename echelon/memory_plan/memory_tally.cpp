#include "echelon/memory_plan/memory_tally.h"

#include <algorithm>

namespace echelon::detail {

void MemoryTally::hold_on_host(int64_t bytes) {
  host_ += bytes;
  host_peak_ = std::max(host_peak_, host_);
}

void MemoryTally::moment(const std::string& what, const MemoryByKind& more) {
  if (now_.total() + more.total() <= peak_.total()) return;
  peak_ = now_;
  for (const MemoryKind kind : kMemoryKinds) peak_[kind] += more[kind];
  moment_ = what;
}

void MemoryTally::forget_peak() {
  peak_ = now_;
  moment_ = "between two steps";
}

void PooledBytes::take(int64_t bytes, MemoryKind kind) {
  if (bytes == 0) return;
  Size& size = sizes_[bytes];
  size.peak = std::max(size.peak, ++size.used);
  if (!size.idle.empty()) {
    tally_.drop(size.idle.back(), bytes);
    size.idle.pop_back();
  }
  tally_.hold(kind, bytes);
}

void PooledBytes::give(int64_t bytes, MemoryKind kind) {
  if (bytes == 0) return;
  Size& size = sizes_[bytes];
  --size.used;
  size.idle.push_back(kind);
}

void PooledBytes::trim() {
  for (auto& [bytes, size] : sizes_) {
    const auto needed = static_cast<size_t>(size.peak - size.used);
    while (size.idle.size() > needed) {
      tally_.drop(size.idle.back(), bytes);
      size.idle.pop_back();
    }
    size.peak = size.used;
  }
}

void CallList::add(
    const std::string& operation, const std::string& axis,
    const std::string& what, int64_t bytes, int64_t count) {
  if (!on_ || bytes == 0) return;
  for (auto& known : list_) {
    if (known.operation != operation || known.axis != axis ||
        known.what != what) {
      continue;
    }
    known.count += count;
    known.bytes += bytes;
    return;
  }
  list_.push_back({operation, axis, what, count, bytes});
}

}  // namespace echelon::detail
