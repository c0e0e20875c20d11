#include "echelon/options/shard.h"

#include "echelon/config/section.h"

namespace echelon {

void bind(config::Section& section, ShardOptions& options) {
  section
      .field(
          "stage", options.stage,
          "what is cut over the ranks of fsdp: 1 the optimizer's state, 2 "
          "gradients "
          "too, 3 parameters too")
      .at_least(1)
      .at_most(3);
  section
      .field(
          "gather", options.gather,
          "stage 3: a unit's parameters stay together while it is used, or "
          "until "
          "the step ends")
      .one_of({"auto", "use", "step"});
  section
      .field(
          "prefetch", options.prefetch,
          "units whose parameters are gathered before they are needed")
      .at_least(0)
      .at_most(64);
  section
      .field(
          "prefetch_bytes", options.prefetch_bytes,
          "most bytes that are gathered ahead; 0: no limit")
      .at_least(0);
}

}  // namespace echelon
