#include "echelon/job/unused_settings.h"

#include "echelon/architecture/language_model.h"

namespace echelon {
namespace {

// `unless`: as in find_unused_settings.
template <class Unless>
void find_unused_precision(const Job& job, const Unless& unless) {
  const auto& precision = job.precision;
  const bool low = precision.compute != "same";
  const bool dynamic = precision.compute == "fp16" && precision.loss_scale == 0;
  const std::string by_scale =
      precision.loss_scale > 0 ? "with a loss_scale that is fixed"
                               : "with compute \"" + precision.compute + "\"";
  unless(
      dynamic, by_scale,
      {"precision.initial_loss_scale", "precision.loss_scale_growth"});
  unless(
      dynamic || precision.loss_scale > 0, by_scale,
      {"precision.max_overflows"});
  const bool sums = adds_gradients(job);
  const std::string computed = low ? precision.compute : job.model.dtype;
  unless(
      sums && precision.reduce != computed,
      sums ? "where gradients are in " + computed + " already"
           : "with 1 data-parallel rank",
      {"precision.reduce"});
}

}  // namespace

std::vector<std::string> find_unused_settings(const Job& job) {
  const config::Document document =
      job.document.entries().empty() ? describe(job) : job.document;
  std::vector<std::string> warnings;
  const config::Document defaults = describe(Job{});
  const auto unless = [&](bool used, const std::string& reason,
                          const std::vector<std::string>& keys) {
    for (const auto& key : keys) {
      if (used || document.entry(key).value == defaults.entry(key).value) {
        continue;
      }
      warnings.push_back(document.where(key) + ": has no effect " + reason);
    }
  };
  const auto& optimizer = job.optimizer;
  const std::string by_optimizer = "with optimizer \"" + optimizer.name + "\"";
  unless(
      optimizer.name == "sgd", by_optimizer,
      {"optimizer.momentum", "optimizer.nesterov"});
  unless(
      optimizer.name != "sgd", by_optimizer,
      {"optimizer.beta1", "optimizer.beta2", "optimizer.epsilon"});
  const std::string by_schedule =
      "with schedule \"" + optimizer.schedule + "\"";
  unless(
      optimizer.schedule == "cosine" || optimizer.schedule == "linear",
      by_schedule, {"optimizer.final_factor"});
  unless(
      optimizer.schedule == "step", by_schedule,
      {"optimizer.step_every", "optimizer.step_factor"});

  const auto& model = job.model.name;
  unless(model == "mlp", "with model \"" + model + "\"", {"model.hidden"});
  unless(
      model.rfind("resnet", 0) == 0, "with model \"" + model + "\"",
      {"model.sync_batch_norm"});

  const bool text = is_language_model(job.model);
  unless(!text, "with model \"" + model + "\"", {"model.classes"});
  unless(
      text, "with model \"" + model + "\"",
      {"model.layers", "model.hidden_size", "model.heads", "model.kv_heads",
       "model.intermediate_size", "model.vocab_size", "model.max_positions",
       "model.rope_theta", "model.norm_eps", "model.dropout",
       "model.tie_embeddings"});

  const bool tensor = job.layout.tp > 1;
  unless(
      tensor && text,
      tensor ? "with model \"" + model + "\""
             : "without tensor parallelism (tp is 1)",
      {"layout.sequence_parallel"});
  unless(
      tensor && (text || model == "mlp"),
      tensor ? "with model \"" + model + "\""
             : "without tensor parallelism (tp is 1)",
      {"layout.overlap_chunks"});

  const bool pipeline = job.layout.pp > 1;
  unless(
      pipeline, "without a pipeline (pp is 1)",
      {"layout.microbatches", "layout.schedule", "layout.stages_per_rank",
       "layout.schedule_file"});
  unless(
      pipeline || !job.model.devices.empty(), "without a pipeline or devices",
      {"model.cut"});
  unless(
      (pipeline || !job.model.devices.empty()) && job.model.cut.empty(),
      job.model.cut.empty() ? "without a pipeline or devices" : "with cut",
      {"model.balance"});
  unless(
      pipeline || !job.model.devices.empty(), "without a pipeline or devices",
      {"model.device_bytes"});

  const bool sharded = job.layout.dp_shard > 1;
  const std::string no_shards = "without sharded data parallelism (fsdp is 1)";
  unless(sharded, no_shards, {"shard.stage"});
  const bool gathers = sharded && job.shard.stage == 3;
  unless(
      gathers,
      sharded ? "with stage " + std::to_string(job.shard.stage) : no_shards,
      {"shard.gather", "shard.prefetch", "shard.prefetch_bytes"});
  const auto& memory = job.memory;
  unless(
      memory.recompute == "budget",
      "with recompute \"" + memory.recompute + "\"",
      {"memory.activation_bytes"});
  const auto& data = job.data.name;
  const std::string by_data = "with data \"" + data + "\"";
  unless(
      data == "tensors" || data == "images" || data == "text", by_data,
      {"data.path"});
  unless(
      data == "text", by_data,
      {"data.sources", "data.weights", "data.format", "data.tokenizer",
       "data.vocab_size", "data.token_bytes", "data.sequence", "data.documents",
       "data.document_separator", "data.end_of_text_id"});
  unless(
      data == "dummy", by_data, {"data.samples", "data.shape", "data.classes"});
  unless(
      data == "images", by_data,
      {"data.image_size", "data.crop", "data.flip", "data.mean", "data.std",
       "data.bad_image", "data.max_image_pixels"});
  unless(job.data.holdout_path.empty(), "with holdout_path", {"data.holdout"});
  unless(
      job.data.holdout > 0 || !job.data.holdout_path.empty(),
      "when nothing is held out", {"train.eval_every"});

  unless(
      job.train.compress == "powersgd",
      "with compress \"" + job.train.compress + "\"", {"train.powersgd_rank"});
  unless(
      job.layout.num_ranks() > 1, "with 1 rank",
      {"train.compress", "train.bucket_bytes"});
  unless(
      !shards_parameters(job) || job.layout.num_ranks() == 1,
      "where parameters are in shards, which are reduced layer by layer",
      {"train.bucket_bytes"});
  unless(
      !shards_parameters(job),
      "where parameters are in shards, which allow it always",
      {"train.find_unused_parameters"});
  find_unused_precision(job, unless);
  return warnings;
}

}  // namespace echelon
