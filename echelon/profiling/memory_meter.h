// The memory that a rank holds, by kind, at each moment of a step.
//
//   MemoryMeter meter;
//   { const auto counting = meter.count(); … a step … }
//   meter.peak();                       // by kind, when their sum was largest
//
// The meter follows the allocators' reports of each block that this thread, or
// backward for it, makes on CPUs and GPUs. MemoryKindScope gives a block its
// kind when it is made; set_memory_kind() and keep_as_activations() change the
// kind later. A block counts until any thread frees it. Memory that libraries
// allocate by themselves, unused memory in a caching allocator, and storages
// that were not made by torch's allocators are not counted.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/types.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "echelon/timeline/memory_kind.h"

namespace echelon::profiling {

/// While a scope lives, blocks that this thread makes are of `kind`; the
/// innermost scope decides. Without a scope they are `working`.
class MemoryKindScope {
 public:
  explicit MemoryKindScope(timeline::MemoryKind kind);
  ~MemoryKindScope();
  MemoryKindScope(const MemoryKindScope&) = delete;
  MemoryKindScope& operator=(const MemoryKindScope&) = delete;

 private:
  timeline::MemoryKind outer_;
};

/// Changes the kind of the storage of `tensor`. Costs nothing when no meter
/// counts.
void set_memory_kind(const torch::Tensor& tensor, timeline::MemoryKind kind);

/// Gives the gradients that autograd accumulates in these leaves the kind
/// `gradients`. Hooks that the leaves already have still run, afterwards.
void name_gradients(const std::vector<torch::Tensor>& parameters);

/// Turns the live blocks of kind `working` that this thread's meter counts into
/// activations. Called where a layer's forward ends.
void keep_as_activations();

class MemoryMeter {
 public:
  /// Counts blocks on `device`; a GPU's index matters.
  explicit MemoryMeter(torch::Device device = torch::kCPU);
  ~MemoryMeter();
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;

  /// While the result lives, blocks that this thread (and backward for it)
  /// makes are counted until they are freed. The innermost meter counts. The
  /// result must be destroyed on the same thread.
  using Counting = c10::DebugInfoGuard;
  std::unique_ptr<Counting> count();

  timeline::MemoryByKind now() const;
  /// The memory at the moment since reset_peak() when the sum was largest.
  timeline::MemoryByKind peak() const;
  void reset_peak();

  /// A block that would bring the sum above this throws c10::OutOfMemoryError
  /// on the thread that asks for it; 0: no limit. For CPUs alone: a GPU has a
  /// limit of its own.
  void limit(int64_t bytes);
  /// The memory held when the limit or a GPU last refused a block; now(), if
  /// none was refused.
  timeline::MemoryByKind at_shortage() const;

  /// For a timeline: a sample (steady clock, nanoseconds) of each change by at
  /// least `resolution_bytes` since start_samples(). With more than kMaxSamples
  /// the resolution gets coarser.
  static constexpr size_t kMaxSamples = 4096;
  void start_samples(int64_t resolution_bytes = 64 << 10);
  std::vector<timeline::MemorySample> take_samples();

  struct Impl;

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace echelon::profiling
