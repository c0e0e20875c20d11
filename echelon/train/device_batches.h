// Batches on their way to a device, beside what it computes.
#pragma once

#include <c10/core/Stream.h>
#include <torch/types.h>

#include <optional>

#include "echelon/data/dataset.h"

namespace echelon {

/// Copies batches to a device on a stream of their own. The host prepares a
/// step while the device computes the one before, so a copy is over when its
/// step begins.
class DeviceBatches {
 public:
  /// A CPU has no streams: its batches stay as they are.
  explicit DeviceBatches(torch::Device device);

  /// `batch` with its tensors on the device, for the calling thread's current
  /// stream. Those of the host should be pinned.
  Batch copy(const Batch& batch) const;

 private:
  torch::Device device_;
  std::optional<c10::Stream> stream_;
};

}  // namespace echelon
