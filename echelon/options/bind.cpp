// The keys of all tables but [data] and [model], which have files of their own.
// A bind() states each key once: its field, help, bounds and names. The same
// statements read a configuration, check a job that a program made, and list
// the keys in this order. An enum's names are a constant at the top where
// to_string() needs them too, so that a message spells a value as a
// configuration does.
#include "echelon/options/bind.h"

#include <algorithm>

namespace echelon {
namespace {

constexpr int64_t kLargestDegree = 1 << 20;

constexpr config::Names<Gather> kGatherNames = {
    {"auto", Gather::automatic}, {"use", Gather::use}, {"step", Gather::step}};

constexpr config::Names<Recompute> kRecomputeNames = {
    {"none", Recompute::none},
    {"all", Recompute::all},
    {"selective", Recompute::selective},
    {"budget", Recompute::budget}};

constexpr config::Names<Activations> kActivationsNames = {
    {"keep", Activations::keep},
    {"offload", Activations::offload},
    {"bf16", Activations::bf16}};

constexpr config::Names<Offload> kOffloadNames = {
    {"none", Offload::none},
    {"optimizer", Offload::optimizer},
    {"parameters", Offload::parameters}};

constexpr config::Names<ComputeDtype> kComputeDtypeNames = {
    {"auto", ComputeDtype::automatic}, {"same", ComputeDtype::same},
    {"tf32", ComputeDtype::tf32},      {"bf16", ComputeDtype::bf16},
    {"fp16", ComputeDtype::fp16},      {"fp8", ComputeDtype::fp8}};

constexpr config::Names<ReduceDtype> kReduceDtypeNames = {
    {"same", ReduceDtype::same},
    {"float32", ReduceDtype::float32},
    {"bf16", ReduceDtype::bf16}};

constexpr config::Names<OptimizerKind> kOptimizerKindNames = {
    {"sgd", OptimizerKind::sgd},
    {"adam", OptimizerKind::adam},
    {"adamw", OptimizerKind::adamw}};

constexpr config::Names<Compression> kCompressionNames = {
    {"none", Compression::none},
    {"bf16", Compression::bf16},
    {"fp16", Compression::fp16},
    {"powersgd", Compression::powersgd}};

constexpr config::Names<RankKind> kRankKindNames = {
    {"processes", RankKind::processes}, {"threads", RankKind::threads}};

constexpr config::Names<OnNonFinite> kOnNonFiniteNames = {
    {"stop", OnNonFinite::stop},
    {"skip", OnNonFinite::skip},
    {"rollback", OnNonFinite::rollback}};

constexpr config::Names<CudaGraphs> kCudaGraphsNames = {
    {"auto", CudaGraphs::automatic},
    {"on", CudaGraphs::on},
    {"off", CudaGraphs::off}};

constexpr config::Names<BestMetric> kBestMetricNames = {
    {"none", BestMetric::none},
    {"loss", BestMetric::loss},
    {"eval_loss", BestMetric::eval_loss},
    {"eval_accuracy", BestMetric::eval_accuracy}};

void bind_order(config::Section& section, Layout& layout) {
  std::vector<std::string> names = order_names(layout.order);
  section
      .field(
          "order", names,
          "order of the axes, outermost first: ranks that differ only along "
          "the last one are neighbours; axes of degree 1 may be left out")
      .rule([&] { return set_order(layout, names); });
}

constexpr config::Names<ContextWay> kContextWayNames = {
    {"auto", ContextWay::automatic},
    {"ring", ContextWay::ring},
    {"all_gather", ContextWay::all_gather},
    {"ulysses", ContextWay::ulysses},
    {"ulysses_ring", ContextWay::ulysses_ring}};

constexpr config::Names<MemoryCopies> kMemoryCopiesNames = {
    {"auto", MemoryCopies::automatic}, {"off", MemoryCopies::off}};

bool at_intervals(const CheckpointOptions& options) {
  return options.every_steps > 0 || options.every_minutes > 0;
}

}  // namespace

std::string to_string(Gather gather) {
  return config::name_of(gather, kGatherNames);
}

std::string to_string(Recompute recompute) {
  return config::name_of(recompute, kRecomputeNames);
}

std::string to_string(Activations activations) {
  return config::name_of(activations, kActivationsNames);
}

std::string to_string(Offload offload) {
  return config::name_of(offload, kOffloadNames);
}

std::string to_string(ComputeDtype compute) {
  return config::name_of(compute, kComputeDtypeNames);
}

std::string to_string(ReduceDtype reduce) {
  return config::name_of(reduce, kReduceDtypeNames);
}

std::string to_string(OptimizerKind kind) {
  return config::name_of(kind, kOptimizerKindNames);
}

std::string to_string(Compression compression) {
  return config::name_of(compression, kCompressionNames);
}

std::string to_string(RankKind kind) {
  return config::name_of(kind, kRankKindNames);
}

std::string to_string(OnNonFinite reaction) {
  return config::name_of(reaction, kOnNonFiniteNames);
}

std::string to_string(CudaGraphs graphs) {
  return config::name_of(graphs, kCudaGraphsNames);
}

std::string to_string(BestMetric metric) {
  return config::name_of(metric, kBestMetricNames);
}

std::string to_string(ContextWay way) {
  return config::name_of(way, kContextWayNames);
}

int64_t head_ranks(const ContextParallelOptions& options, int64_t cp) {
  if (cp == 1) return 1;
  switch (options.way) {
    case ContextWay::ulysses:
      return cp;
    case ContextWay::ulysses_ring:
      return std::max<int64_t>(1, options.ulysses);
    default:
      return 1;
  }
}

std::string to_string(MemoryCopies copies) {
  return config::name_of(copies, kMemoryCopiesNames);
}

const std::vector<std::string>& degree_keys() {
  static const std::vector<std::string> keys = {
      "dp", "dp_replicate", "fsdp", "dp_shard", "tp", "pp", "cp", "ep"};
  return keys;
}

void bind(config::Section& section, Layout& layout) {
  section
      .field(
          "dp", layout.dp_replicate,
          "replicas of the model, each with its own samples")
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
      "pp", layout.pp,
      "ranks over which the layers are partitioned into pipeline stages",
      {.at_least = 1, .at_most = kLargestDegree});
  section.field(
      "cp", layout.cp, "ranks that shard the sequence",
      {.at_least = 1, .at_most = kLargestDegree});
  section.field(
      "ep", layout.ep,
      "ranks over which experts are distributed, each with its own samples",
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
      "what the ranks of fsdp shard: 1 optimizer state, 2 also gradients, 3 "
      "also parameters",
      {.at_least = 1, .at_most = 3});
  section.field(
      "gather", options.gather,
      "stage 3: how long a unit's parameters stay unsharded: while it is "
      "used, or until the step ends",
      kGatherNames);
  section.field(
      "prefetch", options.prefetch,
      "units that are unsharded ahead of their use",
      {.at_least = 0, .at_most = 64});
  section.field(
      "prefetch_bytes", config::Bytes(options.prefetch_bytes),
      "the most bytes unsharded ahead; 0: no limit", {.at_least = 0});
  section.field(
      "registered_buffers", options.registered_buffers,
      "NCCL with NVLink SHARP: unsharded parameters and gradients are in "
      "memory that it has registered, which spares copies and "
      "multiprocessors; no other tensor gets that memory");
}

void bind(config::Section& section, TensorParallelOptions& options) {
  section.field(
      "sequence_parallel", options.sequence_parallel,
      "tensor parallel: shard the tokens of norms, dropout and residual sums, "
      "which saves memory");
  section.field(
      "overlap_chunks", options.overlap_chunks,
      "tensor parallel: chunks of a matmul; one is communicated while another "
      "is computed; 0: on GPUs by the cost model, else 1",
      {.at_least = 0, .at_most = 64});
}

void bind(config::Section& section, ContextParallelOptions& options) {
  section.field(
      "context", options.way,
      "context parallel: how queries reach the keys of other ranks: they pass "
      "round, are all-gathered, heads are exchanged for tokens, or groups "
      "exchange heads and pass keys round between them; auto: by the cost "
      "model",
      kContextWayNames);
  section.field(
      "context_ulysses", options.ulysses,
      "with ulysses_ring: neighbouring ranks that exchange heads; it divides "
      "cp; 0: by the cost model",
      {.at_least = 0, .at_most = kLargestDegree});
}

void bind(config::Section& section, CommOptions& options) {
  section.field(
      "backend", options.backend,
      "the communication library; auto: nccl with a GPU per rank, local on one "
      "host, gloo otherwise",
      {{"auto", BackendKind::automatic},
       {"local", BackendKind::local},
       {"gloo", BackendKind::gloo},
       {"nccl", BackendKind::nccl}});
  section.field(
      "device", options.device,
      "where a rank computes; auto: a GPU where each rank has one, else the "
      "CPU; cpu: never a GPU; cuda: an error where a rank has none",
      {{"auto", DeviceKind::automatic},
       {"cpu", DeviceKind::cpu},
       {"cuda", DeviceKind::cuda}},
      /*unlisted=*/{{"test", DeviceKind::test}});
  section.field(
      "timeout", options.timeout,
      "how long a collective may take before it fails on all its ranks",
      {.at_least = 1, .at_most = 7 * 24 * 3600});
  section.field(
      "rendezvous_timeout", options.rendezvous_timeout,
      "how long a rank waits for the others when the job starts",
      {.at_least = 1, .at_most = 24 * 3600});
  section.field(
      "share_tensors", options.share_tensors,
      "local, between processes: keep big tensors in memory that the host's "
      "ranks share");
  section.field(
      "check_collectives", options.check_collectives,
      "compare operation, reduction, shape, dtype and label across ranks "
      "before each collective; local always does");
}

void bind(config::Section& section, MemoryOptions& options) {
  section.field(
      "recompute", options.recompute,
      "what backward recomputes: nothing, each layer, each layer except "
      "its matmuls, or the cheapest layers",
      kRecomputeNames);
  section.field(
      "activation_bytes", config::Bytes(options.activation_bytes),
      "recompute \"budget\": bytes of activations that a rank may keep",
      {.at_least = 0});
  section.field(
      "activations", options.activations,
      "tensors saved for backward are kept as they are, offloaded to host "
      "memory, or rounded to bf16",
      kActivationsNames);
  section.field(
      "offload", options.offload,
      "what host memory holds: nothing, the optimizer state, or also the "
      "parameters",
      kOffloadNames);
  section.field(
      "limit_bytes", config::Bytes(options.limit_bytes),
      "device memory that a rank may use; 0: all of a GPU, no limit on CPUs",
      {.at_least = 0});
}

void bind(config::Section& section, PrecisionOptions& options) {
  section.field(
      "compute", options.compute,
      "dtype of forward and backward; parameters are updated in [model] "
      "dtype; auto: bf16 on GPUs that have it, else same; tf32: float32, with "
      "products in TF32 on GPUs; fp8: bf16, with products of linear layers "
      "in 8 bits on GPUs",
      kComputeDtypeNames);
  section.field(
      "reduce", options.reduce,
      "dtype in which gradients are reduced over ranks; same: their own",
      kReduceDtypeNames);
  section.field(
      "loss_scale", options.loss_scale,
      "factor of the loss in backward; 0: dynamic for fp16, else 1",
      {.at_least = 0});
  section.field(
      "initial_loss_scale", options.initial_loss_scale,
      "fp16: the dynamic scale of the first step", {.above = 0});
  section.field(
      "loss_scale_growth", options.loss_scale_growth,
      "fp16: steps without overflow after which the scale doubles",
      {.at_least = 1});
  section.field(
      "max_overflows", options.max_overflows,
      "fp16: overflows in a row after which training stops", {.at_least = 1});
}

void bind(config::Section& section, OptimizerOptions& options) {
  section.field("name", options.name, "the optimizer", kOptimizerKindNames);
  section.field(
      "learning_rate", options.learning_rate,
      "the learning rate after the warmup", {.above = 0});
  double decay = options.decay();
  section.field(
      "weight_decay", decay,
      "not applied to biases and norm parameters; by default 0.01 for adamw, 0 "
      "for adam and sgd",
      {.at_least = 0});
  // A default follows the name when a program changes it.
  if (decay != options.decay()) options.weight_decay = decay;
  section.field(
      "momentum", options.momentum, "sgd: momentum",
      {.at_least = 0, .below = 1});
  section.field("nesterov", options.nesterov, "sgd: Nesterov momentum");
  section.field(
      "beta1", options.beta1, "adam, adamw: decay of the mean of gradients",
      {.at_least = 0, .below = 1});
  section.field(
      "beta2", options.beta2,
      "adam, adamw: decay of the mean of squared gradients",
      {.at_least = 0, .below = 1});
  section.field(
      "epsilon", options.epsilon, "adam, adamw: added to the denominator",
      {.above = 0});
  section.field(
      "clip_norm", options.clip_norm,
      "largest global gradient norm; 0: no clipping", {.at_least = 0});
  section.field(
      "schedule", options.schedule,
      "how the learning rate changes after the warmup",
      {{"constant", RateSchedule::constant},
       {"cosine", RateSchedule::cosine},
       {"linear", RateSchedule::linear},
       {"step", RateSchedule::step}});
  section.field(
      "warmup_steps", options.warmup_steps,
      "steps in which the rate rises from 0 to learning_rate", {.at_least = 0});
  section.field(
      "final_factor", options.final_factor,
      "cosine, linear: the last rate as a fraction of learning_rate",
      {.at_least = 0, .at_most = 1});
  section.field(
      "step_every", options.step_every, "step: steps between two drops",
      {.at_least = 0});
  section.field(
      "step_factor", options.step_factor,
      "step: factor of the rate at each drop", {.above = 0, .at_most = 1});
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
      "global batch: samples per optimizer step, over all ranks and "
      "microbatches",
      {.at_least = 1, .at_most = 1 << 30});
  section.field(
      "rank_batch", options.rank_batch,
      "samples per data-parallel rank instead of equal shares; they sum to "
      "batch",
      {.at_least = 1});
  section.field(
      "rebalance_every", options.rebalance_every,
      "full steps after which the ranks' speeds are compared; the batch is "
      "divided anew, or the stages of a pipeline are cut anew, where the "
      "slowest then works 5 % less and a new cut pays; 0: never",
      {.at_least = 0});
  section.field(
      "accumulate", options.accumulate,
      "gradient accumulation: backward passes per optimizer step",
      {.at_least = 1});
  section.field(
      "seed", options.seed,
      "for initial values, the order of samples and dropout");
  section
      .field(
          "run", options.run,
          "the folder that the run writes; {name} in it is the configuration's "
          "file name, {set} what --layout and --set give "
          "(tp=2,learning_rate=0.1), {time} the "
          "time of the start, as in runs/{name}-{set}")
      .not_empty();
  section.field(
      "overwrite", options.overwrite, "replace the run folder if it exists");
  section.field(
      "log_every", options.log_every, "steps between two progress lines",
      {.at_least = 1});
  section
      .field(
          "log", options.log,
          "what is written besides metrics.jsonl: \"tensorboard\", event files "
          "in the run's folder tensorboard/; \"otlp\", OpenTelemetry traces of "
          "steps in otlp/")
      .rule([&] {
        const bool known =
            std::ranges::all_of(options.log, [](const std::string& one) {
              return one == "tensorboard" || one == "otlp";
            });
        return known ? "" : "is a list of \"tensorboard\" and \"otlp\"";
      });
  section.field(
      "eval_every", options.eval_every,
      "steps between two evaluations; 0: each epoch", {.at_least = 0});
  section.field(
      "layer_norms", options.layer_norms,
      "record the norm of each layer's gradients, every log_every steps");
  section.field(
      "threads", options.threads,
      "compute threads per rank; 0: the job's cores / ranks",
      {.at_least = 0, .at_most = 4096});
  section.field(
      "compress", options.compress, "compression of gradients in reductions",
      kCompressionNames);
  section.field(
      "powersgd_rank", options.powersgd_rank,
      "powersgd: rank of the approximation", {.at_least = 1, .at_most = 1024});
  section.field(
      "bucket_bytes", config::Bytes(options.bucket_bytes),
      "bytes of gradients per all-reduce", {.at_least = 1});
  section.field(
      "find_unused_parameters", options.find_unused_parameters,
      "allow parameters that a forward pass does not use");
  section.field(
      "ranks", options.ranks, "processes, or threads of one process",
      kRankKindNames);
  section.field(
      "cuda_graphs", options.cuda_graphs,
      "GPUs repeat a captured step, without a launch for each kernel: auto, "
      "where it is known to be safe",
      kCudaGraphsNames);
  section.field(
      "timeline_steps", options.timeline_steps,
      "steps that the timeline records; 0: none", {.at_least = 0});
  section.field(
      "watch_seconds", options.watch_seconds,
      "seconds between two steps that are recorded for `echelon watch --web`; "
      "0: none is",
      {.at_least = 0});
  section.field(
      "on_non_finite", options.on_non_finite,
      "a step whose loss or gradients are not finite: end the run; or skip the "
      "step, at most 3 in a row, and then end the run, or go back to the "
      "newest "
      "saved state and leave out the samples since",
      kOnNonFiniteNames);
  section.field(
      "check_replicas_every", options.check_replicas_every,
      "steps between two comparisons of the parameters that several ranks "
      "hold, bit by bit; 0: never",
      {.at_least = 0});
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
  section.field(
      "best", options.best, "also keep the best checkpoint by this metric",
      kBestMetricNames);
  section.field("async", options.async, "write files while training continues");
  section.field(
      "attempts", options.attempts,
      "failures in a row after which training stops; each is retried at the "
      "next interval",
      {.at_least = 1});
  section
      .field(
          "resume", options.resume,
          "auto, never, or a run folder or checkpoint to start from, also "
          "s3://…; a run with checkpoints of its own resumes from the newest")
      .not_empty();
  section.field(
      "force", options.force, "resume although the seed or the data differ");
  section.field(
      "remote", options.remote,
      "s3://BUCKET/PREFIX where each checkpoint is uploaded, and from where a "
      "run on an empty disk resumes; {name}, {time} and {set} as in train.run");
}

void bind(config::Section& section, ElasticOptions& options) {
  section.field(
      "memory", options.memory,
      "keep copies of the training state in the host's memory, from which a "
      "job that may restart goes on; auto: where they fit",
      kMemoryCopiesNames);
  section.field(
      "memory_steps", options.memory_steps,
      "steps between two copies; 0: so many that copies cost about 1 % of the "
      "time",
      {.at_least = 0});
}

}  // namespace echelon
