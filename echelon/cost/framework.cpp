// The constants of each framework. "[fit]": least squares on the logarithm of
// the steps in benchmarks/published, with a third held out. What frameworks
// keep in memory is from arXiv:2205.05198 for Megatron (32-bit gradients next
// to 16-bit weights, masters with the optimizer) and from documents and sources
// of the others; context, buffers and fragments are [fit] to the memory in
// benchmarks/published.
#include "echelon/cost/framework.h"

#include <deque>

#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/nearest.h"

namespace echelon::cost {
namespace {

constexpr double kGiB = 1073741824.0;

// What frameworks keep in memory
// -----------------------------------------------------------------------------

FrameworkMemory megatron_memory() {
  return {
      .gated_kept = 4,
      .selective = SelectiveWay::attention_scores,
      .masters_beside = true,
      .gradient_bytes = 4,
      .context_bytes = 1.0 * kGiB};
}

// Transformer Engine's kernels; gradients are summed in 16 bits.
FrameworkMemory megatron_core_memory() {
  return {
      .gated_kept = 3,
      .selective = SelectiveWay::attention_scores,
      .masters_beside = true,
      .gradient_bytes = 2,
      .shards_over_cp = true,
      .logit_working_bytes = 10,
      .context_bytes = 1.0 * kGiB};
}

// Gradients in 16 bits, the optimizer's shard of them in 32; two buckets of
// 5e8.
FrameworkMemory deepspeed_memory() {
  FrameworkMemory memory = megatron_memory();
  memory.gradient_bytes = 2;
  memory.master_gradient_bytes = 4;
  memory.buffer_bytes = 2 * 2 * 5e8;
  memory.context_bytes = 4.0 * kGiB;
  memory.fragment_share = 0.3;
  return memory;
}

FrameworkMemory echelon_memory() {
  return {
      .gated_kept = 3,  // silu_times() in parallel/tensor/mlp.h
      .selective = SelectiveWay::keeps_products,
      .shards_over_cp = true,  // MeshGroups::shard
      .logit_kept_bytes = 2,
      .logit_working_bytes = 2,  // the gradient: kernels/vocab_loss.h
      .context_bytes = 0.5 * kGiB,
      .fragment_share = 0.05};
}

FrameworkMemory fsdp_memory() {
  return {
      .gated_kept = 4,
      .selective = SelectiveWay::keeps_half,
      .shards_over_cp = true,
      .keeps_embedding = true,
      .reduce_bytes = 4,
      .logit_working_bytes = 10,
      .context_bytes = 1.0 * kGiB,
      .fragment_share = 0.05};
}

// Each one's constants
// -----------------------------------------------------------------------------

class Frameworks {
 public:
  /// Adds a framework with the constants of `base`, for the caller to change.
  Framework& add(const char* name, const Framework& base = {}) {
    Framework& added = all_.emplace_back(base);
    added.name = name;
    return added;
  }
  const std::deque<Framework>& all() const { return all_; }

 private:
  std::deque<Framework> all_;  // references stay valid
};

/// Adds the frameworks that shard parameters.
void add_sharding(Frameworks& list) {
  Framework& trainer = list.add("echelon");
  trainer.host_seconds = 3e-6;
  trainer.graphs = true;  // train/step_graphs.h
  trainer.gradient_bytes = 0;
  trainer.loss_kernels = true;
  trainer.norm_gradient_kernels = 1;  // kernels/norm.h
  // kernels/update.h moves 28: parameters and two moments are read and written,
  // gradients read. Their norm reads these once more.
  trainer.optimizer_bytes = 32;
  trainer.context_ways = true;
  trainer.overlaps_products = true;       // parallel/tensor/linear.h
  trainer.hidden_context_parallel = 0.9;  // ring; the others wait
  trainer.gathers_at_once = true;         // ShardedUnits::after_update
  trainer.bucket_bytes = 256 * 1024;      // as in gradient_reducer.h
  // ShardedUnits::begin_backward and PipelineModel::before_gradients.
  trainer.reduces_each_microbatch = true;
  trainer.reduces_until_backward = true;
  trainer.gathers_gradients = true;
  trainer.memory = echelon_memory();

  // PyTorch's FullyShardedDataParallel.
  Framework& fsdp = list.add("fsdp");
  fsdp.host_seconds = 6e-6;
  fsdp.gradient_bytes = 2;
  fsdp.accumulate_bytes = 4;
  fsdp.optimizer_bytes = 30;
  fsdp.reduces_each_microbatch = true;
  fsdp.memory = fsdp_memory();
  fsdp.compute_share = 0.89;
  fsdp.attention_speed = 0.69;
  fsdp.overlap_slowdown = 0.55;
  fsdp.step_host_seconds = 30e-3;

  // torchtitan with torch.compile; FSDP 2 shards each parameter.
  Framework& torchtitan = list.add("torchtitan", fsdp);
  torchtitan.compute_share = 0.78;
  torchtitan.attention_speed = 1;
  torchtitan.overlap_slowdown = 0.02;
  torchtitan.loss_bytes = 10;
  torchtitan.step_host_seconds = 10e-3;
  torchtitan.memory.logit_working_bytes = 8;  // the loss is one kernel

  // Since April 2025 (its pull request 1033) the loss is compiled too: no logit
  // is ever in 32 bits.
  Framework& torchtitan_2025 = list.add("torchtitan-2025", torchtitan);
  torchtitan_2025.memory.logit_kept_bytes = 2;
  torchtitan_2025.memory.logit_working_bytes = 2;  // the gradient

  Framework& torchtitan_eager = list.add("torchtitan-eager", torchtitan);
  torchtitan_eager.memory.logit_working_bytes = 10;
  torchtitan_eager.fused_elementwise = false;

  // Tensor-parallel collectives in pieces, overlapped with the matmuls.
  Framework& torchtitan_async_tp = list.add("torchtitan-async-tp", torchtitan);
  torchtitan_async_tp.hidden_tensor_parallel = 0.1;
  torchtitan_async_tp.hidden_backward_tensor_parallel = 0.1;

  // Compiled by XLA.
  Framework& maxtext = list.add("maxtext", fsdp);
  maxtext.native_attention = true;
  maxtext.gradient_bytes = 4;
  maxtext.reduces_each_microbatch = false;
  maxtext.compute_share = 1.03;
  maxtext.attention_speed = 1;
  maxtext.overlap_slowdown = 0.1;

  Framework& paxml = list.add("paxml", maxtext);
  paxml.compute_share = 0.67;

  // llm.c: handwritten kernels, one program per device.
  Framework& llm_c = list.add("llm.c");
  llm_c.host_seconds = 2e-6;
  llm_c.gradient_bytes = 2;
}

/// Megatron-LM until 2023, and what builds on its layers.
void add_megatrons(Frameworks& list) {
  // Megatron-LM as of 2021: scores in memory, nothing overlapped.
  Framework& megatron_2021 = list.add("megatron-2021");
  megatron_2021.fused_attention = false;
  megatron_2021.dropout = true;
  megatron_2021.compute_share = 0.94;  // [fit] to arXiv:2104.04473
  // [fit] Layers of hidden size 1024 wait for their launches.
  megatron_2021.host_seconds = 42e-6;
  megatron_2021.overlaps_gradients = false;
  megatron_2021.overlaps_parameters = false;
  megatron_2021.gradient_bytes = 2;
  megatron_2021.accumulate_bytes = 7.5;  // [fit]
  // [fit] The part of a step that does not grow with the microbatches.
  megatron_2021.optimizer_bytes = 35;
  megatron_2021.loss_bytes = 30;  // [fit]
  megatron_2021.blocking_transfers = true;
  megatron_2021.scatters_transfers = true;
  megatron_2021.memory = megatron_memory();

  // The same as vTrain's authors profiled it (arXiv:2312.12391).
  Framework& vtrain = list.add("megatron-vtrain", megatron_2021);
  // [fit] Heads on one rank take three times as long.
  vtrain.pads_vocabulary = false;
  vtrain.compute_share = 1;

  // The fork that trained BLOOM: tried out with CUDA_LAUNCH_BLOCKING=1, without
  // which hundreds of devices hung (the authors' chronicles). Its
  // tensor-parallel sums are slow: [fit] to layouts that differ in tp alone.
  Framework& fork = list.add("megatron-deepspeed", megatron_2021);
  fork.compute_share = 1;
  fork.launches_wait = true;
  fork.collective_share = 0.35;
  fork.memory = deepspeed_memory();

  // The same in bf16: 16-bit gradients are accumulated in 32 bits, which are
  // not sharded.
  Framework& fork_bf16 = list.add("megatron-deepspeed-bf16", fork);
  fork_bf16.memory.gradient_bytes = 2 + 4;
  fork_bf16.memory.master_gradient_bytes = 0;
  fork_bf16.memory.buffer_bytes = 2 * 4 * 5e8;  // buckets in 32 bits, too

  // Megatron-LM as of 2022 with sequence parallelism and selective recompute.
  Framework& megatron_2022 = list.add("megatron-2022", megatron_2021);
  megatron_2022.compute_share = 1;
  megatron_2022.hidden_backward_tensor_parallel = 0.5;
  megatron_2022.accumulate_bytes = 6;

  // Megatron-LM as of 2023 with nothing overlapped: the baseline of the
  // zero-bubble schedules.
  Framework& megatron_2023 = list.add("megatron-2023", megatron_2022);
  megatron_2023.compute_share = 0.97;  // [fit]
  megatron_2023.optimizer_bytes = 40;

  // The authors' fork of it (arXiv:2401.10241), as it runs their own schedules.
  Framework& zero_bubble = list.add("zero-bubble", megatron_2023);
  zero_bubble.blocking_transfers = false;
  zero_bubble.validates_afterwards = true;

  // The same with the norm of all stages' gradients before the update.
  Framework& synchronous = list.add("zero-bubble-synchronous", zero_bubble);
  synchronous.validates_afterwards = false;

  // DeepSpeed's ZeRO stage 3 around Megatron-LM's layers.
  Framework& deepspeed = list.add("deepspeed", megatron_2021);
  deepspeed.collective_share = 0.09;  // [fit] to arXiv:2104.04473, table 2
  deepspeed.overlaps_gradients = true;
  deepspeed.overlaps_parameters = true;
  deepspeed.gradient_bytes = 2;
  deepspeed.reduces_each_microbatch = true;
  deepspeed.memory = deepspeed_memory();
}

/// Megatron core, and what builds on it.
void add_megatron_cores(Frameworks& list) {
  // Megatron core with Transformer Engine.
  Framework& core = list.add("megatron-core");
  core.native_attention = true;
  core.host_seconds = 4e-6;
  core.step_host_seconds = 30e-3;
  core.gradient_bytes = 4;
  core.accumulate_bytes = 6;
  core.optimizer_bytes = 36;
  core.hidden_tensor_parallel = 0.9;
  core.hidden_backward_tensor_parallel = 0.9;
  core.memory = megatron_core_memory();
  core.compute_share = 0.88;
  core.overlap_slowdown = 0.01;
  core.quantise_bytes = 2;

  // NeMo of 2023, before Transformer Engine overlapped collectives with
  // matmuls.
  Framework& nemo = list.add("nemo-2023", core);
  nemo.native_attention = false;
  nemo.fused_attention = false;
  nemo.compute_share = 0.70;  // [fit] ddp_scaling's twelve rows of 5 and 175 B
  nemo.step_host_seconds = 12e-3;
  nemo.hidden_tensor_parallel = 0;
  nemo.hidden_backward_tensor_parallel = 0;

  // Megatron core with Megatron-Bridge's recipes, NeMo containers 26.02
  // and 26.04. [fit] all: nemo_h100, nemo_other_gpus, dgxc_benchmarking's
  // GB200.
  Framework& bridge = list.add("megatron-bridge", core);
  bridge.compute_share = 0.83;
  bridge.hidden_expert_parallel = 0.3;
  bridge.host_seconds = 3e-6;
  bridge.quantise_bytes = 1;
  bridge.expert_share = 0.9;
  bridge.expert_host_seconds = 2.6e-3;

  // Its containers of 2025: slower matmuls of experts, more host overhead.
  Framework& bridge_25 = list.add("megatron-bridge-25", bridge);
  bridge_25.expert_host_seconds = 3.3e-3;
  bridge_25.expert_share = 0.8;

  // Containers since 26.06: layers of experts run without the host.
  Framework& bridge_26_06 = list.add("megatron-bridge-26.06", bridge);
  bridge_26_06.expert_host_seconds = 0.2e-3;
}

const std::deque<Framework>& frameworks() {
  static const Frameworks list = [] {
    Frameworks made;
    add_sharding(made);
    add_megatrons(made);
    add_megatron_cores(made);
    return made;
  }();
  return list.all();
}

}  // namespace

const std::vector<std::string>& framework_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const Framework& framework : frameworks())
      list.push_back(framework.name);
    return list;
  }();
  return names;
}

const Framework& find_framework(std::string_view name) {
  for (const Framework& framework : frameworks()) {
    if (framework.name == name) return framework;
  }
  throw ConfigError(format(
      "unknown stack \"{}\"; known: {}{}", name, join(framework_names(), ", "),
      config::did_you_mean(name, framework_names())));
}

Framework
framework_on(const Framework& framework, const cluster::Device& device) {
  Framework here = framework;
  if (!device.processor) return here;
  here.overlaps_gradients = false;
  here.overlaps_parameters = false;
  here.overlaps_products = false;
  here.hidden_tensor_parallel = 0;
  here.hidden_backward_tensor_parallel = 0;
  here.hidden_context_parallel = 0;
  here.hidden_expert_parallel = 0;
  return here;
}

}  // namespace echelon::cost
