// Memory and copies of flat buffers: a pool of blocks for tensors that come and
// go within a step (unsharded parameters and gradients), and a stream for
// copies that overlap with computation.
//
// A block that was used a moment ago is warm. A fresh one costs page faults,
// which take a CPU longer than the communication that fills the block.
#pragma once

#include <torch/types.h>

#include <c10/core/Allocator.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "echelon/comm/group.h"
#include "echelon/timeline/memory_kind.h"

namespace echelon::sharding {

/// Idle blocks of device memory by exact size. Not thread-safe. On a GPU,
/// blocks are used in the order of the stream that takes them.
class BufferPool {
 public:
  explicit BufferPool(torch::Device device) : device_(device) {}

  /// Every block is registered with `group` (Group::allocate_registered). Every
  /// rank of the group calls this before the first take(), so that each
  /// collective finds registered blocks on all ranks, in whatever order they
  /// take them.
  void register_with(const Group& group) { group_ = group; }

  /// Throws ConfigError where a block has to be allocated while a graph is
  /// captured and blocks are registered. The same step, run before, has left
  /// the blocks that it needs.
  at::DataPtr take(size_t bytes);
  void give(size_t bytes, at::DataPtr block);

  /// At the end of a step: returns to the allocator the blocks that the step
  /// did not need at its peak. Registered ones go back to the communicator's
  /// pool, for blocks of other sizes.
  void trim();

  torch::Device device() const { return device_; }

 private:
  struct SizeClass {
    std::vector<at::DataPtr> idle;
    size_t used = 0;
    size_t peak = 0;  // of `used` since the last trim
  };

  torch::Device device_;
  std::optional<Group> group_;  // with which blocks are registered
  std::map<size_t, SizeClass> classes_;
};

/// A tensor [numel] whose memory can be taken away while views of it stay
/// alive. Reading it while it is detached is an error that LibTorch may not
/// notice.
class PooledTensor {
 public:
  PooledTensor() = default;
  PooledTensor(int64_t numel, torch::Dtype dtype, torch::Device device);

  const torch::Tensor& tensor() const { return tensor_; }
  bool attached() const { return attached_; }
  /// Takes memory from the pool; its values are undefined. Does nothing when
  /// attached.
  void attach(BufferPool& pool, timeline::MemoryKind kind);
  /// Returns the memory to the pool. Does nothing when not attached.
  void detach(BufferPool& pool);

 private:
  torch::Tensor tensor_;
  bool attached_ = false;
};

/// A GPU stream next to the compute stream, for copies that the computation
/// does not wait for. A CPU has no streams: copies finish at once.
class CopyStream {
 public:
  explicit CopyStream(torch::Device device);

  /// While it lives, operators of this thread go to this stream, after all that
  /// the compute stream has been given so far.
  class Scope {
   public:
    explicit Scope(const CopyStream& stream);

   private:
    std::optional<c10::StreamGuard> guard_;
  };

  /// A position in the stream. Copies share it. A default one counts as
  /// reached.
  class Mark {
   public:
    /// Makes later work of this thread's stream wait for the position.
    void wait() const;
    /// Returns when the GPU has reached the position.
    void synchronize() const;

   private:
    friend class CopyStream;
    std::shared_ptr<c10::Event> event_;
    torch::Device device_ = torch::kCPU;
  };

  /// The position after all work that the stream has been given so far.
  Mark mark() const;

 private:
  torch::Device device_;
  std::optional<c10::Stream> stream_;
};

}  // namespace echelon::sharding
