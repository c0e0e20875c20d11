#include "echelon/options/memory.h"

#include "echelon/config/section.h"

namespace echelon {

void bind(config::Section& section, MemoryOptions& options) {
  section
      .field(
          "recompute", options.recompute,
          "what backward computes again: nothing, each layer, each layer but "
          "its "
          "matrix products, or the cheapest layers")
      .one_of({"none", "all", "selective", "budget"});
  section
      .field(
          "activation_bytes", options.activation_bytes,
          "recompute \"budget\": what a rank may keep for backward")
      .at_least(0);
  section
      .field(
          "activations", options.activations,
          "what is kept for backward stays as it is, goes to the host's "
          "memory, or "
          "is rounded")
      .one_of({"keep", "offload", "bf16"});
  section
      .field(
          "offload", options.offload,
          "what lies in the host's memory: nothing, the optimizer's state, or "
          "parameters too")
      .one_of({"none", "optimizer", "parameters"});
  section
      .field(
          "limit_bytes", options.limit_bytes,
          "what a rank may use of its device; 0: what a GPU has, no limit on "
          "CPUs")
      .at_least(0);
}

}  // namespace echelon
