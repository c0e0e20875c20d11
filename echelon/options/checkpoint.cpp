#include "echelon/options/checkpoint.h"

#include "echelon/config/section.h"

namespace echelon {
namespace {

bool at_intervals(const CheckpointOptions& options) {
  return options.every_steps > 0 || options.every_minutes > 0;
}

}  // namespace

bool saves(const CheckpointOptions& options) {
  return options.at_end || at_intervals(options);
}

bool saves_beside(const CheckpointOptions& options) {
  return options.async && at_intervals(options);
}

void bind(config::Section& section, CheckpointOptions& options) {
  section
      .field(
          "every_steps", options.every_steps,
          "steps between two checkpoints; 0: not by steps")
      .at_least(0);
  section
      .field(
          "every_minutes", options.every_minutes,
          "minutes between two checkpoints; 0: not by time")
      .at_least(0);
  section.field("at_end", options.at_end, "one after the last step");
  section.field("keep", options.keep, "the newest ones stay").at_least(2);
  section
      .field("best", options.best, "and the best one by this figure of the run")
      .one_of({"none", "loss", "eval_loss", "eval_accuracy"});
  section.field("async", options.async, "files are written beside training");
  section
      .field(
          "attempts", options.attempts,
          "checkpoints that may fail in a row; each is tried again at the next "
          "interval")
      .at_least(1);
  section
      .field(
          "resume", options.resume,
          "auto, never, or what a run begins with that has no checkpoints yet: "
          "another run's folder or a checkpoint; with some of its own, a run "
          "goes "
          "on from the newest of them")
      .not_empty();
  section.field(
      "force", options.force, "resume though the seed or the data differ");
}

}  // namespace echelon
