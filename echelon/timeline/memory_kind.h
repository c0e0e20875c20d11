// Kinds of memory, and sums by kind. Free of LibTorch: plans, timelines and
// reports use them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace echelon::timeline {

enum class MemoryKind {
  parameters,  // masters and shards
  gradients,
  optimizer_state,
  activations,    // kept from forward to backward
  unsharded,      // full parameters of sharded units
  communication,  // buffers of collectives
  working,        // of one operator or layer, gone after it
};

inline constexpr std::array<MemoryKind, 7> kMemoryKinds = {
    MemoryKind::parameters,  MemoryKind::gradients, MemoryKind::optimizer_state,
    MemoryKind::activations, MemoryKind::unsharded, MemoryKind::communication,
    MemoryKind::working};

/// "parameters", "optimizer state", …
constexpr std::string_view to_string(MemoryKind kind) {
  constexpr std::array<std::string_view, 7> names = {
      "parameters", "gradients",     "optimizer state", "activations",
      "unsharded",  "communication", "working"};
  return names[static_cast<size_t>(kind)];
}

/// Bytes by kind.
struct MemoryByKind {
  std::array<int64_t, kMemoryKinds.size()> bytes{};

  int64_t& operator[](MemoryKind kind) {
    return bytes[static_cast<size_t>(kind)];
  }
  int64_t operator[](MemoryKind kind) const {
    return bytes[static_cast<size_t>(kind)];
  }
  int64_t total() const {
    int64_t sum = 0;
    for (const int64_t one : bytes) sum += one;
    return sum;
  }
};

/// What a rank held at one moment.
struct MemorySample {
  int64_t time_ns = 0;
  MemoryByKind memory;
};

}  // namespace echelon::timeline
