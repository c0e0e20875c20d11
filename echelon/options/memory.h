// Settings of what is kept in memory, and where. Free of LibTorch: the command
// line checks them.
#pragma once

#include <cstdint>
#include <string>

namespace echelon {

namespace config {
class Section;
}

struct MemoryOptions {
  /// What backward computes again instead of keeping it.
  ///   none       nothing
  ///   all        each layer: its inputs alone are kept
  ///   selective  each layer but its matrix products and attention
  ///              (Korthikanti et al., 2022, arXiv:2205.05198)
  ///   budget     the layers that cost least, until activation_bytes suffice
  std::string recompute = "none";
  int64_t activation_bytes = 0;  // of a rank; recompute = "budget"
  /// What is kept for backward stays where and as it is (keep), goes to the
  /// host's memory (offload), or is rounded (bf16).
  std::string activations = "keep";
  /// What lies in the host's memory, where the optimizer then runs: nothing
  /// (none), the optimizer's state and master parameters (optimizer), or the
  /// parameters' shards as well (parameters).
  std::string offload = "none";
  /// What a rank may use of its device; 0: what a GPU has, no limit on CPUs.
  int64_t limit_bytes = 0;

  bool operator==(const MemoryOptions&) const = default;
};

void bind(config::Section& section, MemoryOptions& options);  // [memory]

}  // namespace echelon
