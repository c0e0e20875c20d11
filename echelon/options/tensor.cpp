#include "echelon/options/tensor.h"

#include "echelon/config/section.h"

namespace echelon {

void bind(config::Section& section, TensorParallelOptions& options) {
  section.field(
      "sequence_parallel", options.sequence_parallel,
      "tensor parallel: norms, dropout and residual sums on a part of the "
      "tokens "
      "each, which saves memory");
  section
      .field(
          "overlap_chunks", options.overlap_chunks,
          "tensor parallel: pieces in which products are summed, and cut "
          "tokens "
          "gathered, while the other pieces are computed")
      .at_least(1)
      .at_most(64);
}

}  // namespace echelon
