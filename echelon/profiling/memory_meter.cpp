// A meter sees allocations on the thread that makes them, through LibTorch's
// thread-local debug information, which backward takes to its own threads. For
// CPU blocks, an allocator around torch's own reports to the meter; the first
// meter that counts installs it. (Torch's own reporter prints a warning for
// each block that is older than the count.) Live blocks are in one table for
// the process, so that a free is seen on any thread.
#include "echelon/profiling/memory_meter.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace echelon::profiling {
namespace {

const auto kSlot = c10::DebugInfoKind::PROFILER_STATE;

thread_local timeline::MemoryKind current_kind = timeline::MemoryKind::working;
thread_local void* last_reported = nullptr;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

struct MemoryMeter::Impl : c10::MemoryReportingInfoBase,
                           std::enable_shared_from_this<Impl> {
  explicit Impl(c10::Device counted) : device(counted) {}

  // Called by c10 for GPUs, and for CPU allocators that report by themselves.
  void reportMemoryUsage(
      void* data, int64_t bytes, size_t, size_t, c10::Device where) override;
  void
  reportOutOfMemory(int64_t bytes, size_t, size_t, c10::Device where) override;
  // If this returned true, torch's CPU allocator would warn about each block
  // that it does not know.
  bool memoryProfilingEnabled() const override { return false; }

  bool counts(c10::Device where) const {
    return where.type() == device.type() &&
           (where.is_cpu() || where.index() == device.index());
  }

  // The table's mutex guards everything below.
  void change(timeline::MemoryKind kind, int64_t bytes) {
    current[kind] += bytes;
    total += bytes;
    if (total > peak_total) {
      peak_total = total;
      peak = current;
    }
    if (sampling) sample();
  }
  void sample();

  const c10::Device device;
  std::atomic<int64_t> limit = 0;
  timeline::MemoryByKind current;
  int64_t total = 0;
  timeline::MemoryByKind peak;
  int64_t peak_total = 0;
  std::optional<timeline::MemoryByKind> shortage;
  std::unordered_set<void*> working;  // blocks of that kind
  bool sampling = false;
  int64_t resolution = 0;
  std::vector<timeline::MemorySample> samples;
};

namespace {

using Meter = MemoryMeter::Impl;

// The blocks of the process that meters count.
class Table {
 public:
  void add(void* data, int64_t bytes, const std::shared_ptr<Meter>& meter) {
    std::lock_guard lock(mutex_);
    erase(data);  // freed unseen
    blocks_[data] = {meter, bytes, current_kind};
    if (current_kind == timeline::MemoryKind::working)
      meter->working.insert(data);
    meter->change(current_kind, bytes);
    size_ = blocks_.size();
  }

  void remove(void* data) {
    if (size_ == 0) return;
    std::lock_guard lock(mutex_);
    erase(data);
    size_ = blocks_.size();
  }

  void set_kind(void* data, timeline::MemoryKind kind) {
    if (size_ == 0) return;
    std::lock_guard lock(mutex_);
    const auto found = blocks_.find(data);
    if (found == blocks_.end() || found->second.kind == kind) return;
    Block& block = found->second;
    Meter& meter = *block.meter;
    if (block.kind == timeline::MemoryKind::working) meter.working.erase(data);
    if (kind == timeline::MemoryKind::working) meter.working.insert(data);
    block.turn(kind);
    meter.change(kind, 0);
  }

  void keep(Meter& meter) {
    std::lock_guard lock(mutex_);
    for (void* data : meter.working) {
      blocks_.at(data).turn(timeline::MemoryKind::activations);
    }
    meter.working.clear();
    meter.change(timeline::MemoryKind::working, 0);
  }

  void forget(const Meter* meter) {
    std::lock_guard lock(mutex_);
    std::erase_if(blocks_, [&](const auto& item) {
      return item.second.meter.get() == meter;
    });
    size_ = blocks_.size();
  }

  template <class Body>
  auto locked(const Body& body) {
    std::lock_guard lock(mutex_);
    return body();
  }

 private:
  struct Block {
    std::shared_ptr<Meter> meter;
    int64_t bytes = 0;
    timeline::MemoryKind kind = timeline::MemoryKind::working;

    void turn(timeline::MemoryKind other) {
      meter->current[kind] -= bytes;
      meter->current[other] += bytes;
      kind = other;
    }
  };

  void erase(void* data) {
    const auto found = blocks_.find(data);
    if (found == blocks_.end()) return;
    const Block block = std::move(found->second);
    blocks_.erase(found);
    block.meter->working.erase(data);
    block.meter->change(block.kind, -block.bytes);
  }

  std::mutex mutex_;
  std::unordered_map<void*, Block> blocks_;
  std::atomic<size_t> size_ = 0;
};

Table& table() {
  static auto* all = new Table;  // tensors may outlive everything
  return *all;
}

// The meter of this thread; null when it has none.
Meter* meter_here() {
  auto* info = c10::ThreadLocalDebugInfo::get(kSlot);
  return info == nullptr ? nullptr : dynamic_cast<Meter*>(info);
}

// Wraps the allocator that CPU tensors had when the first meter counted.
class CountingAllocator : public c10::Allocator {
 public:
  CountingAllocator() { inner() = c10::GetCPUAllocator(); }

  c10::DataPtr allocate(size_t bytes) override {
    Meter* meter = meter_here();
    const bool counts =
        meter != nullptr && bytes > 0 && meter->counts(c10::Device(c10::kCPU));
    if (counts) check_limit(*meter, static_cast<int64_t>(bytes));
    last_reported = nullptr;
    void* data = inner()->raw_allocate(bytes);
    if (counts && last_reported != data) {
      table().add(data, static_cast<int64_t>(bytes), meter->shared_from_this());
    }
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

  // Called before any meter counts; later calls have no effect.
  static void install() {
    static std::once_flag once;
    std::call_once(once, [] {
      c10::SetCPUAllocator(new CountingAllocator, /*priority=*/100);
    });
  }

 private:
  static void check_limit(Meter& meter, int64_t bytes) {
    const int64_t limit = meter.limit;
    if (limit == 0) return;
    const int64_t total = table().locked([&] {
      if (meter.total + bytes > limit) meter.shortage = meter.current;
      return meter.total;
    });
    TORCH_CHECK_WITH(
        OutOfMemoryError, total + bytes <= limit, "out of memory: ", bytes,
        " bytes on top of ", total, " of the limit of ", limit);
  }
  static c10::Allocator*& inner() {
    static c10::Allocator* allocator = nullptr;
    return allocator;
  }
  static void release(void* data) {
    table().remove(data);  // first: another thread may get the address at once
    inner()->raw_deallocate(data);
  }
};

class NamesGradient : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit NamesGradient(std::unique_ptr<PostAccumulateGradHook> earlier)
      : earlier_(std::move(earlier)) {}
  void operator()(const torch::autograd::Variable& variable) override {
    set_memory_kind(variable.grad(), timeline::MemoryKind::gradients);
    if (earlier_) (*earlier_)(variable);
  }

 private:
  std::unique_ptr<PostAccumulateGradHook> earlier_;
};

}  // namespace

void MemoryMeter::Impl::reportMemoryUsage(
    void* data, int64_t bytes, size_t, size_t, c10::Device where) {
  if (!counts(where)) return;
  if (bytes > 0) {
    last_reported = data;
    table().add(data, bytes, shared_from_this());
  } else {
    table().remove(data);
  }
}

void MemoryMeter::Impl::reportOutOfMemory(
    int64_t, size_t, size_t, c10::Device where) {
  if (!counts(where)) return;
  table().locked([&] { shortage = current; });
}

void MemoryMeter::Impl::sample() {
  if (!samples.empty()) {
    const auto& last = samples.back().memory;
    const bool far = std::ranges::any_of(
        timeline::kMemoryKinds, [&](timeline::MemoryKind kind) {
          return std::abs(current[kind] - last[kind]) >= resolution;
        });
    if (!far) return;
  }
  samples.push_back({now_ns(), current});
  if (samples.size() < kMaxSamples) return;
  // The larger sample of each two is kept, so that peaks remain.
  resolution *= 2;
  size_t kept = 0;
  for (size_t i = 0; i + 1 < samples.size(); i += 2) {
    const bool second =
        samples[i + 1].memory.total() > samples[i].memory.total();
    samples[kept++] = samples[i + (second ? 1 : 0)];
  }
  samples.resize(kept);
}

MemoryKindScope::MemoryKindScope(timeline::MemoryKind kind)
    : outer_(std::exchange(current_kind, kind)) {}

MemoryKindScope::~MemoryKindScope() {
  current_kind = outer_;
}

void set_memory_kind(const torch::Tensor& tensor, timeline::MemoryKind kind) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  table().set_kind(
      const_cast<void*>(tensor.storage().data_ptr().get_context()), kind);
}

void name_gradients(const std::vector<torch::Tensor>& parameters) {
  for (const auto& parameter : parameters) {
    auto earlier =
        std::move(torch::autograd::impl::post_acc_grad_hooks(parameter));
    torch::autograd::impl::set_post_acc_grad_hooks(
        parameter, std::make_unique<NamesGradient>(std::move(earlier)));
  }
}

void keep_as_activations() {
  if (Meter* meter = meter_here()) table().keep(*meter);
}

MemoryMeter::MemoryMeter(torch::Device device)
    : impl_(std::make_shared<Impl>(device)) {}

MemoryMeter::~MemoryMeter() {
  table().forget(impl_.get());
}

std::unique_ptr<MemoryMeter::Counting> MemoryMeter::count() {
  CountingAllocator::install();
  return std::make_unique<Counting>(kSlot, impl_);
}

timeline::MemoryByKind MemoryMeter::now() const {
  return table().locked([&] { return impl_->current; });
}

timeline::MemoryByKind MemoryMeter::peak() const {
  return table().locked([&] { return impl_->peak; });
}

void MemoryMeter::reset_peak() {
  table().locked([&] {
    impl_->peak = impl_->current;
    impl_->peak_total = impl_->total;
  });
}

void MemoryMeter::limit(int64_t bytes) {
  impl_->limit = bytes;
}

timeline::MemoryByKind MemoryMeter::at_shortage() const {
  return table().locked(
      [&] { return impl_->shortage.value_or(impl_->current); });
}

void MemoryMeter::start_samples(int64_t resolution_bytes) {
  table().locked([&] {
    impl_->sampling = true;
    impl_->resolution = std::max<int64_t>(1, resolution_bytes);
    impl_->samples = {{now_ns(), impl_->current}};
  });
}

std::vector<timeline::MemorySample> MemoryMeter::take_samples() {
  return table().locked([&] {
    impl_->sampling = false;
    if (!impl_->samples.empty()) {
      impl_->samples.push_back({now_ns(), impl_->current});
    }
    return std::exchange(impl_->samples, {});
  });
}

}  // namespace echelon::profiling
