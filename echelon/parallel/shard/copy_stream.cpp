#include "echelon/parallel/shard/copy_stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace echelon::sharding {
namespace {

c10::Stream computing_stream(torch::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace

CopyStream::CopyStream(torch::Device device) : device_(device) {
  if (device.is_cpu()) return;
  stream_ = c10::impl::VirtualGuardImpl(device.type())
                .getStreamFromGlobalPool(device);
}

CopyStream::Scope::Scope(const CopyStream& stream) {
  if (!stream.stream_) return;
  c10::Event behind(stream.device_.type());
  behind.record(computing_stream(stream.device_));
  behind.block(*stream.stream_);
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
  if (event_) event_->block(computing_stream(device_));
}

void CopyStream::Mark::synchronize() const {
  if (event_) event_->synchronize();
}

}  // namespace echelon::sharding
