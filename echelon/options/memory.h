// Settings of what is kept in memory, and where.
#pragma once

#include <cstdint>
#include <string>

namespace echelon {

struct MemoryOptions {
  /// What backward recomputes instead of keeping it.
  ///   none       nothing
  ///   all        each layer; only its inputs are kept
  ///   selective  each layer except its matmuls and attention
  ///              (Korthikanti et al., 2022, arXiv:2205.05198)
  ///   budget     the cheapest layers, until the rest fits activation_bytes
  std::string recompute = "none";
  int64_t activation_bytes = 0;  // of a rank; recompute = "budget"
  /// Tensors kept for backward stay where and as they are (keep), move to the
  /// host's memory (offload), or are rounded (bf16).
  std::string activations = "keep";
  /// What is kept in the host's memory: nothing (none), the optimizer's state
  /// and the master parameters (optimizer), or the parameters' shards as well
  /// (parameters). The optimizer runs where its state is.
  std::string offload = "none";
  /// The bytes that a rank may use of its device; 0: what a GPU has, no limit
  /// on CPUs.
  int64_t limit_bytes = 0;

  bool operator==(const MemoryOptions&) const = default;
};

}  // namespace echelon
