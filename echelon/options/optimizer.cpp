#include "echelon/options/optimizer.h"

#include "echelon/config/section.h"

namespace echelon {

void bind(config::Section& section, OptimizerOptions& options) {
  section.field("name", options.name, "which optimizer")
      .one_of({"sgd", "adam", "adamw"});
  section
      .field(
          "learning_rate", options.learning_rate,
          "the largest rate, after the warm-up")
      .above(0);
  section
      .field(
          "weight_decay", options.weight_decay,
          "not applied to biases and norm parameters")
      .at_least(0);
  section.field("momentum", options.momentum, "sgd: part of the last step kept")
      .at_least(0)
      .below(1);
  section.field(
      "nesterov", options.nesterov, "sgd: look ahead by the momentum");
  section
      .field(
          "beta1", options.beta1, "adam, adamw: decay of the mean of gradients")
      .at_least(0)
      .below(1);
  section
      .field(
          "beta2", options.beta2,
          "adam, adamw: decay of the mean of squared gradients")
      .at_least(0)
      .below(1);
  section.field("epsilon", options.epsilon, "adam, adamw: added to the divisor")
      .above(0);
  section
      .field(
          "clip_norm", options.clip_norm,
          "largest norm of all gradients together; 0: no clipping")
      .at_least(0);
  section
      .field(
          "schedule", options.schedule,
          "how the rate goes on after the warm-up")
      .one_of({"constant", "cosine", "linear", "step"});
  section
      .field(
          "warmup_steps", options.warmup_steps,
          "steps in which the rate rises from 0 to learning_rate")
      .at_least(0);
  section
      .field(
          "final_factor", options.final_factor,
          "cosine, linear: last rate / learning_rate")
      .at_least(0)
      .at_most(1);
  section
      .field("step_every", options.step_every, "step: steps between two drops")
      .at_least(0);
  section
      .field(
          "step_factor", options.step_factor,
          "step: what a drop multiplies the rate by")
      .above(0)
      .at_most(1);
}

}  // namespace echelon
