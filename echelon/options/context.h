// Settings of context parallelism next to its degree.
#pragma once

#include <cstdint>
#include <string>

namespace echelon {

/// How a rank's queries reach the keys and values of the other ranks
/// (parallel/context/attention.h).
enum class ContextWay : uint8_t {
  automatic,  // cost/context_way.h chooses; ring where nothing asks it
  ring,
  all_gather,
  ulysses,
  ulysses_ring
};

struct ContextParallelOptions {
  ContextWay way = ContextWay::automatic;
  /// With ulysses_ring: how many neighbouring ranks exchange heads for tokens.
  /// It divides cp. 0: chosen with the way.
  int64_t ulysses = 0;

  bool operator==(const ContextParallelOptions&) const = default;
};

std::string to_string(ContextWay way);  // "ring"

/// How many neighbouring ranks of cp exchange heads for tokens: all with
/// ulysses, one without. Keys and values go between the groups of so many.
int64_t head_ranks(const ContextParallelOptions& options, int64_t cp);

}  // namespace echelon
