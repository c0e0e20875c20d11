#include "echelon/parallel/shard/buffer_pool.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "echelon/profiling/memory_meter.h"

namespace echelon::sharding {
namespace {

c10::Stream compute_stream(torch::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace

at::DataPtr BufferPool::take(size_t bytes) {
  SizeClass& size = classes_[bytes];
  size.peak = std::max(size.peak, ++size.used);
  if (!size.idle.empty()) {
    at::DataPtr block = std::move(size.idle.back());
    size.idle.pop_back();
    return block;
  }
  const c10::DeviceGuard guard(device_);
  if (!group_) return c10::GetAllocator(device_.type())->allocate(bytes);
  const auto block = group_->allocate_registered(static_cast<int64_t>(bytes));
  return block.storage().unsafeGetStorageImpl()->set_data_ptr(
      at::DataPtr(nullptr, device_));
}

void BufferPool::give(size_t bytes, at::DataPtr block) {
  SizeClass& size = classes_[bytes];
  --size.used;
  size.idle.push_back(std::move(block));
}

void BufferPool::trim() {
  for (auto& [_, size] : classes_) {
    const size_t needed = size.peak - size.used;
    if (size.idle.size() > needed) size.idle.resize(needed);
    size.peak = size.used;
  }
}

PooledTensor::PooledTensor(
    int64_t numel, torch::Dtype dtype, torch::Device device) {
  const auto options = torch::TensorOptions().dtype(dtype).device(device);
  // The size stays when the memory is taken away, so that views remain valid.
  c10::Storage storage(
      c10::Storage::use_byte_size_t(),
      static_cast<size_t>(numel) * c10::elementSize(dtype),
      at::DataPtr(nullptr, device), c10::GetAllocator(device.type()),
      /*resizable=*/false);
  tensor_ = at::empty({0}, options).set_(std::move(storage), 0, {numel}, {1});
}

void PooledTensor::attach(BufferPool& pool, timeline::MemoryKind kind) {
  if (attached_) return;
  auto* storage = tensor_.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(pool.take(storage->nbytes()));
  profiling::set_memory_kind(tensor_, kind);
  attached_ = true;
}

void PooledTensor::detach(BufferPool& pool) {
  if (!attached_) return;
  auto* storage = tensor_.storage().unsafeGetStorageImpl();
  pool.give(
      storage->nbytes(),
      storage->set_data_ptr(at::DataPtr(nullptr, pool.device())));
  attached_ = false;
}

CopyStream::CopyStream(torch::Device device) : device_(device) {
  if (device.is_cpu()) return;
  stream_ = c10::impl::VirtualGuardImpl(device.type())
                .getStreamFromGlobalPool(device);
}

CopyStream::Scope::Scope(const CopyStream& stream) {
  if (!stream.stream_) return;
  c10::Event computed(stream.device_.type());
  computed.record(compute_stream(stream.device_));
  computed.block(*stream.stream_);
  guard_.emplace(*stream.stream_);
}

CopyStream::Mark CopyStream::mark() const {
  Mark mark;
  if (!stream_) return mark;
  mark.device_ = device_;
  mark.event_ = std::make_shared<c10::Event>(device_.type());
  mark.event_->record(*stream_);
  return mark;
}

void CopyStream::Mark::wait() const {
  if (event_) event_->block(compute_stream(device_));
}

void CopyStream::Mark::synchronize() const {
  if (event_) event_->synchronize();
}

}  // namespace echelon::sharding
