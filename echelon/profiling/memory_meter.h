// How much memory of which kind a rank holds, at each moment of a step.
//
//   MemoryMeter meter;
//   { const auto counting = meter.count(); … a step … }
//   meter.peak();                       // by kind, when their sum was largest
//
// Follows the allocators' reports of each block (of this thread and of what
// backward runs for it), on CPUs and GPUs; a block's kind is what
// MemoryKindScope says where it is made, or what set_memory_kind() and
// keep_as_activations() say later. A block counts until it is freed, on
// whatever thread. Not counted: what libraries allocate by themselves, what lay
// in a caching allocator unused, and storages that were not made by torch's
// allocators.
#pragma once

#include <torch/types.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "echelon/timeline/memory_kind.h"

namespace echelon {

/// While it lives, blocks that this thread makes are of `kind`; inner scopes
/// win. Without one they are `working`.
class MemoryKindScope {
 public:
  explicit MemoryKindScope(MemoryKind kind);
  ~MemoryKindScope();
  MemoryKindScope(const MemoryKindScope&) = delete;
  MemoryKindScope& operator=(const MemoryKindScope&) = delete;

 private:
  MemoryKind outer_;
};

/// The storage of `tensor` is of `kind` from now on. Free when nothing is
/// counted.
void set_memory_kind(const torch::Tensor& tensor, MemoryKind kind);

/// Gradients that autograd leaves in these leaves are of kind `gradients` from
/// then on. Hooks that the leaves have already run as before, after it.
void name_gradients(const std::vector<torch::Tensor>& parameters);

/// Blocks of kind `working` that this thread's meter counts and that still live
/// are activations from now on: called where a layer's forward ends.
void keep_as_activations();

class MemoryMeter {
 public:
  /// Counts blocks on `device`; a GPU's index matters.
  explicit MemoryMeter(torch::Device device = torch::kCPU);
  ~MemoryMeter();
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;

  /// While it lives, blocks that this thread makes (and backward for it) are
  /// counted until they are freed. Inner ones win. Destroyed on the same
  /// thread.
  class Counting;
  std::unique_ptr<Counting> count();

  MemoryByKind now() const;
  /// The moment at which the sum was largest since reset_peak().
  MemoryByKind peak() const;
  void reset_peak();

  /// A block that would bring the sum above this throws c10::OutOfMemoryError
  /// on the thread that asks for it; 0: no limit. On CPUs alone: a GPU has its
  /// own.
  void limit(int64_t bytes);
  /// What was held when a block was refused for the last time, by the limit or
  /// by a GPU; now(), if none was.
  MemoryByKind at_shortage() const;

  /// Samples (steady clock, nanoseconds) of each change by at least
  /// `resolution_bytes` since the last call; for a timeline. None until
  /// start_samples(). More than kMaxSamples make the resolution coarser.
  static constexpr size_t kMaxSamples = 4096;
  void start_samples(int64_t resolution_bytes = 64 << 10);
  std::vector<MemorySample> take_samples();

  struct Impl;

 private:
  std::shared_ptr<Impl> impl_;
};

class MemoryMeter::Counting {
 public:
  explicit Counting(std::shared_ptr<Impl> impl);
  ~Counting();
  Counting(const Counting&) = delete;
  Counting& operator=(const Counting&) = delete;

 private:
  struct Guard;
  std::unique_ptr<Guard> guard_;
};

}  // namespace echelon
