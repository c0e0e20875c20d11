#include "echelon/architecture/language_model.h"
#include "echelon/job/check_job.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

// Collects a warning for each key whose value differs from the default although
// it is not used.
class UnusedSettings {
 public:
  explicit UnusedSettings(const Job& job)
      : job_(job),
        document_(
            job.document.entries().empty() ? describe(job) : job.document) {}

  std::vector<std::string> find() {
    find_optimizer();
    find_model();
    find_parallelism();
    find_data();
    find_reduction();
    find_precision();
    find_checkpoint();
    return std::move(warnings_);
  }

 private:
  using Keys = std::vector<std::string>;

  void unless(bool used, const std::string& reason, const Keys& keys) {
    if (used) return;
    for (const auto& key : keys) {
      if (document_.entry(key).value == defaults_.entry(key).value) continue;
      warnings_.push_back(
          format("{}: has no effect {}", document_.where(key), reason));
    }
  }

  void find_optimizer() {
    const OptimizerKind name = job_.optimizer.name;
    const RateSchedule schedule = job_.optimizer.schedule;
    const std::string by_name =
        format("with optimizer \"{}\"", to_string(name));
    unless(
        name == OptimizerKind::sgd, by_name,
        {"optimizer.momentum", "optimizer.nesterov"});
    unless(
        name != OptimizerKind::sgd, by_name,
        {"optimizer.beta1", "optimizer.beta2", "optimizer.epsilon"});
    const std::string by_schedule =
        "with schedule " + document_.entry("optimizer.schedule").value;
    unless(
        schedule == RateSchedule::cosine || schedule == RateSchedule::linear,
        by_schedule, {"optimizer.final_factor"});
    unless(
        schedule == RateSchedule::step, by_schedule,
        {"optimizer.step_every", "optimizer.step_factor"});
  }

  void find_model() {
    const auto& model = job_.model.name;
    const bool text = is_language_model(job_.model);
    const std::string by_model = format("with model \"{}\"", model);
    unless(model == "mlp", by_model, {"model.hidden"});
    unless(model.starts_with("resnet"), by_model, {"model.sync_batch_norm"});
    unless(!text, by_model, {"model.classes"});
    unless(
        text, by_model,
        {"model.layers",
         "model.hidden_size",
         "model.heads",
         "model.kv_heads",
         "model.head_size",
         "model.window",
         "model.global_every",
         "model.query_pre_attn_scalar",
         "model.attention_softcap",
         "model.logit_softcap",
         "model.intermediate_size",
         "model.experts",
         "model.experts_per_token",
         "model.expert_size",
         "model.shared_experts",
         "model.dense_layers",
         "model.expert_groups",
         "model.groups_per_token",
         "model.routing_scale",
         "model.bias_rate",
         "model.query_rank",
         "model.key_value_rank",
         "model.nope_size",
         "model.rope_size",
         "model.value_size",
         "model.vocab_size",
         "model.max_positions",
         "model.rope_theta",
         "model.rope_local_theta",
         "model.rope_factor",
         "model.norm_eps",
         "model.dropout",
         "model.tie_embeddings"});
    unless(
        job_.model.lora.used(), "without adapters (rank is 0)",
        {"lora.alpha", "lora.targets"});
    unless(
        has_experts(job_.model), by_model,
        {"model.normalize_routing", "model.aux_loss", "model.z_loss",
         "model.capacity_factor"});
    const bool tensor = job_.layout.tp > 1;
    const std::string reason =
        tensor ? by_model : "without tensor parallelism (tp is 1)";
    unless(tensor && text, reason, {"layout.sequence_parallel"});
    unless(
        tensor && (text || model == "mlp"), reason, {"layout.overlap_chunks"});
  }

  void find_parallelism() {
    const bool pipeline = job_.layout.pp > 1;
    unless(
        pipeline, "without a pipeline (pp is 1)",
        {"layout.microbatches", "layout.schedule", "layout.stages_per_rank",
         "layout.schedule_file"});
    const bool cut = job_.layout.cp > 1;
    const std::string no_cut = "without context parallelism (cp is 1)";
    unless(cut, no_cut, {"layout.context"});
    unless(
        cut && job_.context.way == ContextWay::ulysses_ring,
        cut ? format("with context \"{}\"", to_string(job_.context.way))
            : no_cut,
        {"layout.context_ulysses"});
    const bool partitioned = pipeline || !job_.model.devices.empty();
    const bool balanced = job_.model.partition_at.empty();
    const std::string whole = "without a pipeline or devices";
    unless(partitioned, whole, {"model.cut"});
    unless(
        partitioned && balanced, balanced ? whole : "with cut",
        {"model.balance"});
    unless(partitioned, whole, {"model.device_bytes"});
    unless(
        job_.layout.data_ranks() > 1 || pipeline,
        "with one data-parallel rank and without a pipeline",
        {"train.rebalance_every"});
    const int64_t sharers = job_.layout.dp_shard * job_.layout.cp;
    const bool sharded = shards_parameters(job_) && sharers > 1;
    const std::string no_shards =
        sharers > 1 ? "where parameters are not sharded (fsdp is 1)"
                    : "without sharded data parallelism (fsdp is 1)";
    unless(sharded, no_shards, {"shard.stage"});
    unless(
        sharded && job_.comm.device != DeviceKind::cpu,
        sharded ? "on CPUs" : no_shards, {"shard.registered_buffers"});
    unless(
        sharded && job_.shard.stage == 3,
        sharded ? format("with stage {}", job_.shard.stage) : no_shards,
        {"shard.gather", "shard.prefetch", "shard.prefetch_bytes"});
    unless(
        job_.memory.recompute == Recompute::budget,
        format("with recompute \"{}\"", to_string(job_.memory.recompute)),
        {"memory.activation_bytes"});
  }

  void find_data() {
    const DataKind data = job_.data.name;
    const std::string by_data = format("with data \"{}\"", to_string(data));
    unless(
        data == DataKind::tensors || data == DataKind::images ||
            data == DataKind::text,
        by_data, {"data.path"});
    unless(
        data == DataKind::text, by_data,
        {"data.sources", "data.weights", "data.format", "data.tokenizer",
         "data.vocab_size", "data.token_bytes", "data.sequence",
         "data.documents", "data.document_separator", "data.text_field",
         "data.chat_template", "data.end_of_text_id"});
    unless(
        data == DataKind::dummy, by_data,
        {"data.samples", "data.shape", "data.classes"});
    unless(
        data == DataKind::images, by_data,
        {"data.image_size", "data.crop", "data.flip", "data.mean", "data.std",
         "data.bad_image", "data.max_image_pixels"});
    const bool separate = !job_.data.holdout_path.empty();
    unless(!separate, "with holdout_path", {"data.holdout"});
    unless(
        separate || job_.data.holdout > 0, "when nothing is held out",
        {"train.eval_every"});
  }

  void find_reduction() {
    const Compression compress = job_.train.compress;
    const bool several = job_.layout.num_ranks() > 1;
    const bool shards = shards_parameters(job_);
    unless(
        compress == Compression::powersgd,
        format("with compress \"{}\"", to_string(compress)),
        {"train.powersgd_rank"});
    unless(several, "with 1 rank", {"train.compress", "train.bucket_bytes"});
    unless(
        !shards || !several,
        "where parameters are in shards, which are reduced layer by layer",
        {"train.bucket_bytes"});
    unless(
        !shards, "where parameters are in shards, which allow it always",
        {"train.find_unused_parameters"});
  }

  void find_precision() {
    const auto& precision = job_.precision;
    const bool low = in_16_bits(precision.compute);
    const bool fixed = precision.loss_scale > 0;
    const bool dynamic = precision.compute == ComputeDtype::fp16 && !fixed;
    const std::string by_scale =
        fixed ? "with a loss_scale that is fixed"
              : format("with compute \"{}\"", to_string(precision.compute));
    unless(
        dynamic, by_scale,
        {"precision.initial_loss_scale", "precision.loss_scale_growth"});
    unless(dynamic || fixed, by_scale, {"precision.max_overflows"});
    const bool sums = adds_gradients(job_);
    const std::string computed =
        low ? to_string(precision.compute) : to_string(job_.model.dtype);
    unless(
        sums && to_string(precision.reduce) != computed,
        sums ? format("where gradients are in {} already", computed)
             : "with 1 data-parallel rank",
        {"precision.reduce"});
  }

  void find_checkpoint() {
    if (job_.checkpoint.remote.empty() || saves(job_.checkpoint)) return;
    warnings_.push_back(
        document_.where("checkpoint.remote") +
        ": nothing is uploaded there, as the run saves nothing; set at_end = "
        "true, every_steps or every_minutes");
  }

  const Job& job_;
  config::Document document_;
  config::Document defaults_ = describe(Job{});
  std::vector<std::string> warnings_;
};

}  // namespace

std::vector<std::string> find_unused_settings(const Job& job) {
  return UnusedSettings(job).find();
}

}  // namespace echelon
