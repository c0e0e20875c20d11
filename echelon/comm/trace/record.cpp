#include "echelon/comm/trace/record.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "echelon/text/format.h"

namespace echelon {
namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

thread_local std::string current_label;
thread_local CollectiveTrace* innermost_trace = nullptr;

}  // namespace

uint64_t History::begin(CollectiveRecord record) {
  record.begin_mark = mark();
  std::lock_guard lock(mutex_);
  record.begin_ns = now_ns();
  record.end_ns = 0;
  if (ring_.size() < kCapacity) {
    ring_.push_back(std::move(record));
  } else {
    ring_[next_ % kCapacity] = std::move(record);
  }
  if (count_ != nullptr) *count_ = next_ + 1;
  return next_++;
}

void History::count_into(std::atomic<uint64_t>* place) {
  std::lock_guard lock(mutex_);
  count_ = place;
  if (count_ != nullptr) *count_ = next_;
}

void History::end(uint64_t ticket, bool failed) {
  std::shared_ptr<std::function<void(const CollectiveRecord&)>> listener;
  CollectiveRecord copy;
  {
    std::lock_guard lock(mutex_);
    if (ticket + kCapacity < next_ || ticket >= next_) return;
    CollectiveRecord& record = ring_[ticket % kCapacity];
    if (record.end_ns != 0) return;
    record.end_ns = now_ns();
    record.failed = failed;
    if (record.wait_begin_ns != 0) {
      waited_ns_ += record.end_ns - record.wait_begin_ns;
    }
    listener = listener_;
    if (listener) copy = record;
  }
  if (listener) (*listener)(copy);
}

void History::begin_wait(uint64_t ticket) {
  std::lock_guard lock(mutex_);
  if (ticket + kCapacity < next_ || ticket >= next_) return;
  CollectiveRecord& record = ring_[ticket % kCapacity];
  if (record.end_ns == 0 && record.wait_begin_ns == 0) {
    record.wait_begin_ns = now_ns();
  }
}

int64_t History::mark() const {
  std::shared_ptr<std::function<int64_t()>> mark;
  {
    std::lock_guard lock(mutex_);
    mark = mark_;
  }
  return mark ? (*mark)() : -1;
}

void History::set_mark(uint64_t ticket, int64_t CollectiveRecord::*which) {
  const int64_t made = mark();
  if (made < 0) return;
  std::lock_guard lock(mutex_);
  if (ticket + kCapacity < next_ || ticket >= next_) return;
  CollectiveRecord& record = ring_[ticket % kCapacity];
  if (record.end_ns == 0 && record.begin_mark >= 0) record.*which = made;
}

void History::mark_wait(uint64_t ticket) {
  set_mark(ticket, &CollectiveRecord::wait_mark);
}

void History::mark_end(uint64_t ticket) {
  set_mark(ticket, &CollectiveRecord::end_mark);
}

std::vector<CollectiveRecord> History::snapshot() const {
  std::lock_guard lock(mutex_);
  std::vector<CollectiveRecord> records;
  records.reserve(ring_.size());
  const uint64_t first = next_ - ring_.size();
  for (uint64_t i = first; i < next_; ++i) {
    records.push_back(ring_[i % kCapacity]);
  }
  return records;
}

int64_t History::waited_ns() const {
  std::lock_guard lock(mutex_);
  return waited_ns_;
}

uint64_t History::count() const {
  std::lock_guard lock(mutex_);
  return next_;
}

void History::on_end(std::function<void(const CollectiveRecord&)> listener) {
  std::lock_guard lock(mutex_);
  listener_ =
      listener ? std::make_shared<std::function<void(const CollectiveRecord&)>>(
                     std::move(listener))
               : nullptr;
}

void History::mark_with(std::function<int64_t()> mark) {
  std::lock_guard lock(mutex_);
  mark_ = mark ? std::make_shared<std::function<int64_t()>>(std::move(mark))
               : nullptr;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  return format("[{}]", join(shape, ", "));
}

LabelScope::LabelScope(std::string label)
    : previous_(std::exchange(current_label, std::move(label))) {}

LabelScope::~LabelScope() {
  current_label = std::move(previous_);
}

const std::string& LabelScope::current() {
  return current_label;
}

CollectiveTrace::CollectiveTrace()
    : outer_(std::exchange(innermost_trace, this)) {}

CollectiveTrace::~CollectiveTrace() {
  innermost_trace = outer_;
}

std::vector<TracedCollective> CollectiveTrace::take() {
  return std::exchange(calls_, {});
}

void CollectiveTrace::record(TracedCollective call) {
  if (!active()) return;
  call.begin = innermost_trace->position_;
  call.end = std::make_shared<int64_t>(call.begin);
  innermost_trace->calls_.push_back(std::move(call));
}

std::function<void()> CollectiveTrace::wait_of_last() {
  if (!active() || innermost_trace->calls_.empty()) return nullptr;
  return [end = innermost_trace->calls_.back().end] {
    if (active()) *end = innermost_trace->position_;
  };
}

bool CollectiveTrace::active() {
  return innermost_trace != nullptr;
}

}  // namespace echelon
