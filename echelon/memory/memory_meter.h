// How much memory of which kind a rank holds, at each moment of a step.
//
//   MemoryMeter meter;
//   { const auto counting = meter.count(); … a step … }
//   meter.peak();                       // by kind, when their sum was largest
//
// Follows the allocators' reports of each block (of this thread and of what
// backward runs for it), on CPUs and GPUs; a block's kind is what
// MemoryKindScope says where it is made, or what set_kind() says later.
#pragma once

#include <torch/types.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "echelon/memory/memory_kind.h"

namespace echelon {

/// While it lives, blocks that this thread makes are of `kind`; inner scopes win.
class MemoryKindScope {
 public:
  explicit MemoryKindScope(MemoryKind kind);
  ~MemoryKindScope();
  MemoryKindScope(const MemoryKindScope&) = delete;
  MemoryKindScope& operator=(const MemoryKindScope&) = delete;
};

/// The storage of `tensor` is of `kind` from now on.
void set_memory_kind(const torch::Tensor& tensor, MemoryKind kind);

class MemoryMeter {
 public:
  MemoryMeter();
  ~MemoryMeter();
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;

  /// Blocks that are made and freed while it lives are counted.
  class Counting;
  std::unique_ptr<Counting> count();

  MemoryByKind now() const;
  /// The moment at which the sum was largest since reset_peak().
  MemoryByKind peak() const;
  void reset_peak();

  /// Samples (steady clock, nanoseconds) of each change by at least
  /// `resolution_bytes` since the last call; for a timeline.
  std::vector<MemorySample> take_samples();

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace echelon
