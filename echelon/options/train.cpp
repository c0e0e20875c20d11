#include "echelon/options/train.h"

#include "echelon/config/section.h"

namespace echelon {

void bind(config::Section& section, TrainOptions& options) {
  section
      .field(
          "steps", options.steps,
          "optimizer steps; exactly one of steps and epochs is set")
      .at_least(0);
  section.field("epochs", options.epochs, "times through the samples")
      .at_least(0);
  section
      .field(
          "batch", options.batch,
          "samples of one optimizer step, over all ranks and backward "
          "passes")
      .at_least(1)
      .at_most(1 << 30);
  section
      .field(
          "rank_batch", options.rank_batch,
          "samples per data-parallel rank instead of equal shares; they "
          "sum to batch")
      .at_least(1);
  section
      .field(
          "accumulate", options.accumulate,
          "backward passes per optimizer step")
      .at_least(1);
  section.field(
      "seed", options.seed,
      "of the initial values, the order of samples and dropout");
  section.field("run", options.run, "the folder that the run writes")
      .not_empty();
  section.field(
      "overwrite", options.overwrite, "replace the run folder if it exists");
  section.field("log_every", options.log_every, "steps between two lines")
      .at_least(1);
  section
      .field(
          "eval_every", options.eval_every,
          "steps between two measurements of accuracy; 0: each epoch")
      .at_least(0);
  section.field(
      "layer_norms", options.layer_norms,
      "record the norm of each layer's gradients, every log_every steps");
  section
      .field(
          "threads", options.threads,
          "compute threads per rank; 0: the job's cores / ranks")
      .at_least(0)
      .at_most(4096);
  section
      .field(
          "compress", options.compress,
          "what gradients travel as; none: as they are")
      .one_of({"none", "bf16", "fp16", "powersgd"});
  section
      .field(
          "powersgd_rank", options.powersgd_rank,
          "powersgd: rank of the approximation")
      .at_least(1)
      .at_most(1024);
  section
      .field(
          "bucket_bytes", options.bucket_bytes,
          "gradients that one collective reduces")
      .at_least(1);
  section.field(
      "find_unused_parameters", options.find_unused_parameters,
      "allow parameters that a forward pass does not use");
  section.field("ranks", options.ranks, "processes, or threads of one process")
      .one_of({"processes", "threads"});
  section
      .field(
          "timeline_steps", options.timeline_steps,
          "steps that the timeline records; 0: none")
      .at_least(0);
}

}  // namespace echelon
