#include "echelon/options/precision.h"

#include "echelon/config/section.h"

namespace echelon {

void bind(config::Section& section, PrecisionOptions& options) {
  section
      .field(
          "compute", options.compute,
          "of forward and backward; parameters are updated in [model] dtype")
      .one_of({"same", "bf16", "fp16"});
  section
      .field(
          "reduce", options.reduce,
          "in which gradients are summed over ranks: as they are, or in this "
          "type")
      .one_of({"same", "float32", "bf16"});
  section
      .field(
          "loss_scale", options.loss_scale,
          "what the loss is multiplied by before backward; 0: for fp16 as "
          "large as "
          "gradients allow, else 1")
      .at_least(0);
  section
      .field(
          "initial_loss_scale", options.initial_loss_scale,
          "fp16: the first scale that is tried")
      .above(0);
  section
      .field(
          "loss_scale_growth", options.loss_scale_growth,
          "fp16: steps without overflow until the scale doubles")
      .at_least(1);
  section
      .field(
          "max_overflows", options.max_overflows,
          "fp16: steps that may overflow in a row before training stops")
      .at_least(1);
}

}  // namespace echelon
