#include "echelon/train/device_batches.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace echelon {

DeviceBatches::DeviceBatches(torch::Device device) : device_(device) {
  if (device.is_cpu()) return;
  stream_ = c10::impl::VirtualGuardImpl(device.type())
                .getStreamFromGlobalPool(device);
}

Batch DeviceBatches::copy(const Batch& batch) const {
  if (!stream_) return batch;
  const c10::Stream computing =
      c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  Batch there = batch;
  {
    const c10::StreamGuard guard(*stream_);
    for_tensors(there, [&](torch::Tensor& tensor) {
      tensor = tensor.to(device_, /*non_blocking=*/true);
      tensor.record_stream(computing);
    });
  }
  c10::Event copied(device_.type());
  copied.record(*stream_);
  copied.block(computing);
  return there;
}

}  // namespace echelon
