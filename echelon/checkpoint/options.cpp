#include "echelon/checkpoint/options.h"

#include "echelon/config/section.h"

namespace echelon {

void bind(config::Section& section, CheckpointOptions& options) {
  section
      .field(
          "every_steps",
          options.every_steps,
          "steps between two checkpoints; 0: not by steps")
      .at_least(0);
  section
      .field(
          "every_minutes",
          options.every_minutes,
          "minutes between two checkpoints; 0: not by time")
      .at_least(0);
  section.field("at_end", options.at_end, "one after the last step");
  section.field("keep", options.keep, "the newest ones stay").at_least(2);
  section
      .field(
          "best",
          options.best,
          "and the best one by this figure of the run")
      .one_of({"none", "loss", "eval_loss", "eval_accuracy"});
  section.field(
      "async", options.async, "files are written beside training");
  section
      .field(
          "attempts",
          options.attempts,
          "checkpoints that may fail in a row; each is tried again at the next "
          "interval")
      .at_least(1);
  section
      .field(
          "resume",
          options.resume,
          "auto (the run's own folder, when it has checkpoints), never, or a "
          "run's folder or a checkpoint")
      .not_empty();
  section.field(
      "force", options.force, "resume though the seed or the data differ");
}

}  // namespace echelon
