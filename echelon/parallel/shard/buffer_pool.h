// Memory of tensors that come and go within a step: gathered parameters and
// flat gradients. A block that was used a moment ago is warm; a fresh one costs
// page faults, on CPUs more time than the communication that fills it.
#pragma once

#include <torch/types.h>

#include <c10/core/Allocator.h>

#include <cstddef>
#include <map>
#include <vector>

#include "echelon/timeline/memory_kind.h"

namespace echelon::sharding {

/// Blocks by exact size. Not thread-safe. On a GPU blocks are used in the order
/// of the stream that takes them.
class BufferPool {
 public:
  explicit BufferPool(torch::Device device) : device_(device) {}

  at::DataPtr take(size_t bytes);
  void give(size_t bytes, at::DataPtr block);

  /// A step has ended: what it did not need at once goes back to the allocator.
  void trim();

  torch::Device device() const { return device_; }

 private:
  struct Size {
    std::vector<at::DataPtr> idle;
    size_t used = 0;
    size_t peak = 0;  // of `used` since the last trim
  };

  torch::Device device_;
  std::map<size_t, Size> sizes_;
};

/// A tensor [numel] whose memory can be taken away while views of it live on.
/// Reading it then is an error that LibTorch may not notice.
class PooledTensor {
 public:
  PooledTensor() = default;
  PooledTensor(int64_t numel, torch::Dtype dtype, torch::Device device);

  const torch::Tensor& tensor() const { return tensor_; }
  bool attached() const { return attached_; }
  /// Values are undefined after it. Nothing when attached.
  void attach(BufferPool& pool, MemoryKind kind);
  /// Nothing when not attached.
  void detach(BufferPool& pool);

 private:
  torch::Tensor tensor_;
  bool attached_ = false;
};

}  // namespace echelon::sharding
