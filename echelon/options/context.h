// Settings of context parallelism next to its degree.
#pragma once

#include <cstdint>
#include <string>

namespace echelon {

/// How a rank's queries reach the keys and values of the other ranks
/// (parallel/context/attention.h).
enum class ContextWay : uint8_t { ring, all_gather, ulysses };

struct ContextParallelOptions {
  ContextWay way = ContextWay::ring;

  bool operator==(const ContextParallelOptions&) const = default;
};

std::string to_string(ContextWay way);  // "ring"

}  // namespace echelon
