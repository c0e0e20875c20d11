// Settings of what is kept in memory, and where.
#pragma once

#include <cstdint>
#include <string>

namespace echelon {

/// What backward recomputes instead of keeping it.
enum class Recompute {
  none,
  all,        // each layer; only its inputs are kept
  selective,  // each layer except its matmuls and attention
              // (Korthikanti et al., 2022, arXiv:2205.05198)
  budget,     // the cheapest layers, until the rest fits activation_bytes
};

/// Tensors kept for backward stay where and as they are, move to the host's
/// memory, or are rounded to bf16.
enum class Activations { keep, offload, bf16 };

/// What is kept in the host's memory. The optimizer runs where its state is.
enum class Offload {
  none,
  optimizer,   // the optimizer's state and the master parameters
  parameters,  // the parameters' shards as well
};

/// Their names in a configuration.
std::string to_string(Recompute recompute);
std::string to_string(Activations activations);
std::string to_string(Offload offload);

struct MemoryOptions {
  Recompute recompute = Recompute::none;
  int64_t activation_bytes = 0;  // of a rank; Recompute::budget
  Activations activations = Activations::keep;
  Offload offload = Offload::none;
  /// The bytes that a rank may use of its device; 0: what a GPU has, no limit
  /// on CPUs.
  int64_t limit_bytes = 0;

  bool operator==(const MemoryOptions&) const = default;
};

}  // namespace echelon
