// Settings of sharded data parallelism.
#pragma once

#include <cstdint>
#include <string>

namespace echelon {

/// Stage 3: how long a unit's parameters stay unsharded.
enum class Gather {
  automatic,  // step for a pipeline where memory.limit_bytes allows, else use
  use,        // while its forward or its backward runs
  step,       // from their first use to the end of the step: less communication
};

/// Its name in a configuration.
std::string to_string(Gather gather);

/// Read when layout.dp_shard > 1. Stages are numbered as in ZeRO: Rajbhandari
/// et al., 2020, arXiv:1910.02054.
struct ShardOptions {
  /// What is sharded over the ranks of dp_shard:
  ///   1  the optimizer's state
  ///   2  gradients too
  ///   3  parameters too
  int64_t stage = 3;
  Gather gather = Gather::automatic;
  /// Units whose parameters are unsharded before they are needed.
  int64_t prefetch = 1;
  /// The most bytes that are unsharded ahead; 0: no limit.
  int64_t prefetch_bytes = 0;
  /// Whether unsharded parameters and gradients are in memory that is
  /// registered with NCCL (Group::allocate_registered), where there is some.
  bool registered_buffers = false;

  bool operator==(const ShardOptions&) const = default;
};

}  // namespace echelon
