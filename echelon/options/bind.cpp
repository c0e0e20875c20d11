// The keys of all tables but [data] and [model], which have files of their own.
#include "echelon/config/section.h"
#include "echelon/options/checkpoint.h"
#include "echelon/options/comm.h"
#include "echelon/options/layout.h"
#include "echelon/options/memory.h"
#include "echelon/options/optimizer.h"
#include "echelon/options/precision.h"
#include "echelon/options/shard.h"
#include "echelon/options/tensor.h"
#include "echelon/options/train.h"

namespace echelon {
namespace {

constexpr int64_t kLargestDegree = 1 << 20;

void bind_order(config::Section& section, Layout& layout) {
  std::vector<std::string> names = order_names(layout.order);
  section
      .field(
          "order", names,
          "of the axes, outermost first: ranks that differ in the last one "
          "alone are neighbours; axes of degree 1 may be left out")
      .rule([&] { return set_order(layout, names); });
}

bool at_intervals(const CheckpointOptions& options) {
  return options.every_steps > 0 || options.every_minutes > 0;
}

}  // namespace

const std::vector<std::string>& degree_keys() {
  static const std::vector<std::string> keys = {
      "dp", "dp_replicate", "fsdp", "dp_shard", "tp", "pp", "cp", "ep"};
  return keys;
}

void bind(config::Section& section, Layout& layout) {
  section
      .field(
          "dp", layout.dp_replicate,
          "copies of the model, each with its own samples")
      .also("dp_replicate")
      .within({.at_least = 1, .at_most = kLargestDegree});
  section
      .field(
          "fsdp", layout.dp_shard,
          "ranks that shard the parameters, each with its own samples")
      .also("dp_shard")
      .within({.at_least = 1, .at_most = kLargestDegree});
  section.field(
      "tp", layout.tp, "ranks that shard each layer's matrices",
      {.at_least = 1, .at_most = kLargestDegree});
  section.field(
      "pp", layout.pp, "pipeline ranks, among which the layers are partitioned",
      {.at_least = 1, .at_most = kLargestDegree});
  section.field(
      "cp", layout.cp, "ranks that shard the sequence",
      {.at_least = 1, .at_most = kLargestDegree});
  section.field(
      "ep", layout.ep, "ranks among which the experts are spread",
      {.at_least = 1, .at_most = kLargestDegree});
  bind_order(section, layout);
}

std::vector<std::string> order_names(const AxisOrder& order) {
  std::vector<std::string> names;
  for (const Axis axis : order) names.emplace_back(short_name(axis));
  return names;
}

void bind(config::Section& section, ShardOptions& options) {
  section.field(
      "stage", options.stage,
      "what is sharded over the ranks of fsdp: 1 the optimizer's state, 2 "
      "gradients too, 3 parameters too",
      {.at_least = 1, .at_most = 3});
  section
      .field(
          "gather", options.gather,
          "stage 3: a unit's parameters stay unsharded while it is used, or "
          "until the step ends")
      .one_of({"auto", "use", "step"});
  section.field(
      "prefetch", options.prefetch,
      "units whose parameters are unsharded before they are needed",
      {.at_least = 0, .at_most = 64});
  section.field(
      "prefetch_bytes", options.prefetch_bytes,
      "most bytes that are unsharded ahead; 0: no limit", {.at_least = 0});
}

void bind(config::Section& section, TensorParallelOptions& options) {
  section.field(
      "sequence_parallel", options.sequence_parallel,
      "tensor parallel: each rank computes norms, dropout and residual sums on "
      "a shard of the tokens, which saves memory");
  section.field(
      "overlap_chunks", options.overlap_chunks,
      "tensor parallel: chunks of a matmul, one of which is summed or gathered "
      "while another is computed",
      {.at_least = 1, .at_most = 64});
}

void bind(config::Section& section, CommOptions& options) {
  section.field(
      "backend", options.backend,
      "what carries the tensors; auto: nccl with a GPU per rank, local on one "
      "host, gloo otherwise",
      {{"auto", BackendKind::automatic},
       {"local", BackendKind::local},
       {"gloo", BackendKind::gloo},
       {"nccl", BackendKind::nccl}});
  section.field(
      "timeout", options.timeout,
      "a collective that takes longer fails on every rank in it",
      {.at_least = 1, .at_most = 7 * 24 * 3600});
  section.field(
      "rendezvous_timeout", options.rendezvous_timeout,
      "how long a rank waits for the others when the job starts",
      {.at_least = 1, .at_most = 24 * 3600});
  section.field(
      "share_tensors", options.share_tensors,
      "local between processes: big tensors live in memory that every rank of "
      "the host maps");
  section.field(
      "check_collectives", options.check_collectives,
      "compare operation, shape and dtype across ranks before each collective; "
      "local always does");
}

void bind(config::Section& section, MemoryOptions& options) {
  section
      .field(
          "recompute", options.recompute,
          "what backward recomputes: nothing, each layer, each layer except "
          "its matmuls, or the cheapest layers")
      .one_of({"none", "all", "selective", "budget"});
  section.field(
      "activation_bytes", options.activation_bytes,
      "recompute \"budget\": what a rank may keep for backward",
      {.at_least = 0});
  section
      .field(
          "activations", options.activations,
          "tensors kept for backward stay as they are, move to the host's "
          "memory, or are rounded")
      .one_of({"keep", "offload", "bf16"});
  section
      .field(
          "offload", options.offload,
          "what is kept in the host's memory: nothing, the optimizer's state, "
          "or parameters too")
      .one_of({"none", "optimizer", "parameters"});
  section.field(
      "limit_bytes", options.limit_bytes,
      "what a rank may use of its device; 0: what a GPU has, no limit on CPUs",
      {.at_least = 0});
}

void bind(config::Section& section, PrecisionOptions& options) {
  section
      .field(
          "compute", options.compute,
          "type of forward and backward; parameters are updated in [model] "
          "dtype")
      .one_of({"same", "bf16", "fp16"});
  section
      .field(
          "reduce", options.reduce,
          "type in which gradients are summed over ranks; same: as they are")
      .one_of({"same", "float32", "bf16"});
  section.field(
      "loss_scale", options.loss_scale,
      "factor of the loss before backward; 0: as large as gradients allow for "
      "fp16, else 1",
      {.at_least = 0});
  section.field(
      "initial_loss_scale", options.initial_loss_scale,
      "fp16: the first scale that is tried", {.above = 0});
  section.field(
      "loss_scale_growth", options.loss_scale_growth,
      "fp16: steps without overflow until the scale doubles", {.at_least = 1});
  section.field(
      "max_overflows", options.max_overflows,
      "fp16: steps that may overflow in a row before training stops",
      {.at_least = 1});
}

void bind(config::Section& section, OptimizerOptions& options) {
  section.field("name", options.name, "which optimizer")
      .one_of({"sgd", "adam", "adamw"});
  section.field(
      "learning_rate", options.learning_rate,
      "the largest rate, after the warmup", {.above = 0});
  section.field(
      "weight_decay", options.weight_decay,
      "not applied to biases and norm parameters", {.at_least = 0});
  section.field(
      "momentum", options.momentum, "sgd: share of the last step that is kept",
      {.at_least = 0, .below = 1});
  section.field(
      "nesterov", options.nesterov, "sgd: look ahead by the momentum");
  section.field(
      "beta1", options.beta1, "adam, adamw: decay of the mean of gradients",
      {.at_least = 0, .below = 1});
  section.field(
      "beta2", options.beta2,
      "adam, adamw: decay of the mean of squared gradients",
      {.at_least = 0, .below = 1});
  section.field(
      "epsilon", options.epsilon, "adam, adamw: added to the divisor",
      {.above = 0});
  section.field(
      "clip_norm", options.clip_norm,
      "largest norm of all gradients together; 0: no clipping",
      {.at_least = 0});
  section
      .field(
          "schedule", options.schedule,
          "how the learning rate changes after the warmup")
      .one_of({"constant", "cosine", "linear", "step"});
  section.field(
      "warmup_steps", options.warmup_steps,
      "steps in which the rate rises from 0 to learning_rate", {.at_least = 0});
  section.field(
      "final_factor", options.final_factor,
      "cosine, linear: last rate / learning_rate",
      {.at_least = 0, .at_most = 1});
  section.field(
      "step_every", options.step_every, "step: steps between two drops",
      {.at_least = 0});
  section.field(
      "step_factor", options.step_factor,
      "step: what a drop multiplies the rate by", {.above = 0, .at_most = 1});
}

void bind(config::Section& section, TrainOptions& options) {
  section.field(
      "steps", options.steps,
      "optimizer steps; exactly one of steps and epochs is set",
      {.at_least = 0});
  section.field(
      "epochs", options.epochs, "times through the samples", {.at_least = 0});
  section.field(
      "batch", options.batch,
      "samples of one optimizer step, over all ranks and backward passes",
      {.at_least = 1, .at_most = 1 << 30});
  section.field(
      "rank_batch", options.rank_batch,
      "samples per data-parallel rank instead of equal shares; they sum to "
      "batch",
      {.at_least = 1});
  section.field(
      "accumulate", options.accumulate, "backward passes per optimizer step",
      {.at_least = 1});
  section.field(
      "seed", options.seed,
      "for initial values, the order of samples and dropout");
  section.field("run", options.run, "the folder that the run writes")
      .not_empty();
  section.field(
      "overwrite", options.overwrite, "replace the run folder if it exists");
  section.field(
      "log_every", options.log_every, "steps between two lines",
      {.at_least = 1});
  section.field(
      "eval_every", options.eval_every,
      "steps between two measurements of accuracy; 0: each epoch",
      {.at_least = 0});
  section.field(
      "layer_norms", options.layer_norms,
      "record the norm of each layer's gradients, every log_every steps");
  section.field(
      "threads", options.threads,
      "compute threads per rank; 0: the job's cores / ranks",
      {.at_least = 0, .at_most = 4096});
  section
      .field(
          "compress", options.compress,
          "compression of gradients that are reduced")
      .one_of({"none", "bf16", "fp16", "powersgd"});
  section.field(
      "powersgd_rank", options.powersgd_rank,
      "powersgd: rank of the approximation", {.at_least = 1, .at_most = 1024});
  section.field(
      "bucket_bytes", options.bucket_bytes,
      "gradients that one collective reduces", {.at_least = 1});
  section.field(
      "find_unused_parameters", options.find_unused_parameters,
      "allow parameters that a forward pass does not use");
  section.field("ranks", options.ranks, "processes, or threads of one process")
      .one_of({"processes", "threads"});
  section.field(
      "timeline_steps", options.timeline_steps,
      "steps that the timeline records; 0: none", {.at_least = 0});
}

bool saves(const CheckpointOptions& options) {
  return options.at_end || at_intervals(options);
}

bool saves_in_background(const CheckpointOptions& options) {
  return options.async && at_intervals(options);
}

void bind(config::Section& section, CheckpointOptions& options) {
  section.field(
      "every_steps", options.every_steps,
      "steps between two checkpoints; 0: not by steps", {.at_least = 0});
  section.field(
      "every_minutes", options.every_minutes,
      "minutes between two checkpoints; 0: not by time", {.at_least = 0});
  section.field("at_end", options.at_end, "save one after the last step");
  section.field(
      "keep", options.keep, "how many of the newest to keep", {.at_least = 2});
  section.field("best", options.best, "keep the best one by this metric too")
      .one_of({"none", "loss", "eval_loss", "eval_accuracy"});
  section.field("async", options.async, "write files while training continues");
  section.field(
      "attempts", options.attempts,
      "checkpoints that may fail in a row; each is tried again at the next "
      "interval",
      {.at_least = 1});
  section
      .field(
          "resume", options.resume,
          "auto, never, or the run folder or checkpoint that a run without "
          "checkpoints of its own starts from; a run that has some resumes "
          "from the newest")
      .not_empty();
  section.field(
      "force", options.force, "resume although the seed or the data differ");
}

}  // namespace echelon
