#include "echelon/memory/host_copies.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/types.h>

#include <exception>
#include <string>
#include <utility>

#include "echelon/error.h"

namespace echelon {
namespace {

using torch::Tensor;

// Copies that may be on their way before forward waits for the oldest.
constexpr size_t kMostLeaving = 4;

Tensor bytes_of(const c10::Storage& storage, c10::Device device) {
  return at::empty(
             {0}, torch::TensorOptions().dtype(torch::kByte).device(device))
      .set_(storage, 0, {static_cast<int64_t>(storage.nbytes())}, {1});
}

Tensor host_bytes(int64_t count, bool pinned) {
  try {
    return at::empty(
        {count},
        torch::TensorOptions().dtype(torch::kByte).pinned_memory(pinned));
  } catch (const c10::Error& error) {
    throw Error(
        "[memory] activations = \"offload\": the host has no memory for " +
        std::to_string(count) + (pinned ? " pinned" : "") +
        " bytes more; keep fewer activations (memory.recompute), or use fewer "
        "ranks per host");
  }
}

c10::impl::VirtualGuardImpl guard_of(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

// `after` waits for what `before` has been told so far.
void order(const c10::Stream& before, const c10::Stream& after) {
  c10::Event event(before.device_type());
  event.record(before);
  event.block(after);
}

}  // namespace

std::shared_ptr<HostCopy>
HostCopies::put(const c10::Storage& storage, c10::Device device) {
  auto copy = std::make_shared<HostCopy>(HostCopy{
      host_bytes(static_cast<int64_t>(storage.nbytes()), device.is_cuda()),
      device});
  if (device.is_cuda()) {
    put_on_stream(storage, *copy, device);
  } else {
    copy->bytes.copy_(bytes_of(storage, device));
  }
  return copy;
}

void HostCopies::put_on_stream(
    const c10::Storage& storage, const HostCopy& copy, c10::Device device) {
  const auto current = guard_of(device).getStream(device);
  const auto& side = side_stream(device);
  order(current, side);
  auto left = std::make_shared<c10::Event>(device.type());
  {
    const c10::StreamGuard on_side(side);
    Tensor bytes = copy.bytes;
    bytes.copy_(bytes_of(storage, device), /*non_blocking=*/true);
    left->record(side);
  }
  leaving_.push_back({storage, current, std::move(left)});
  let_go(kMostLeaving);
}

// Holds on to what is being copied: the current stream could overwrite it.
void HostCopies::let_go(size_t at_most) {
  while (!leaving_.empty()) {
    const auto& oldest = leaving_.front();
    if (!oldest.left->query()) {
      if (leaving_.size() <= at_most) return;
      oldest.left->block(oldest.from);
    }
    leaving_.pop_front();
  }
}

HostCopies::Fetched HostCopies::fetch(const HostCopy& copy) {
  Tensor bytes = at::empty(
      {copy.bytes.numel()},
      torch::TensorOptions().dtype(torch::kByte).device(copy.device));
  if (!copy.device.is_cuda()) {
    bytes.copy_(copy.bytes);
    return {bytes.storage(), nullptr};
  }
  let_go(0);
  const auto guard = guard_of(copy.device);
  const auto& side = side_stream(copy.device);
  // Its memory may have been another tensor's until now.
  order(guard.getStream(copy.device), side);
  auto arrived = std::make_shared<c10::Event>(copy.device.type());
  {
    const c10::StreamGuard on_side(side);
    bytes.copy_(copy.bytes, /*non_blocking=*/true);
    arrived->record(side);
  }
  guard.recordDataPtrOnStream(bytes.storage().data_ptr(), side);
  return {bytes.storage(), std::move(arrived)};
}

void HostCopies::wait(const Fetched& fetched) const {
  if (!fetched.arrived) return;
  const auto device = fetched.storage.device();
  fetched.arrived->block(guard_of(device).getStream(device));
}

const c10::Stream& HostCopies::side_stream(c10::Device device) {
  const auto found = side_streams_.find(device.index());
  if (found != side_streams_.end()) return found->second;
  return side_streams_
      .emplace(
          device.index(),
          guard_of(device).getStreamFromGlobalPool(device, /*high=*/false))
      .first->second;
}

}  // namespace echelon
