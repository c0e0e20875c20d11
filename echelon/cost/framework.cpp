// The constants of each framework. "[fit]": least squares on the logarithm of
// the steps in benchmarks/published, with a third held out. What frameworks
// keep in memory is from arXiv:2205.05198 for Megatron (32-bit gradients next
// to 16-bit weights, masters with the optimizer) and from documents and sources
// of the others; context, buffers and fragments are [fit] to the memory in
// benchmarks/published.
#include "echelon/cost/framework.h"

#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/nearest.h"

namespace echelon {
namespace {

constexpr double kGiB = 1073741824.0;

// Megatron-LM through its years, and what builds on its layers
// ------------------------

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

/// Megatron-LM as of 2021: scores in memory, nothing overlapped.
Framework megatron_2021() {
  Framework s;
  s.name = "megatron-2021";
  s.fused_attention = false;
  s.dropout = true;
  s.compute_share = 0.94;  // [fit] to arXiv:2104.04473
  // [fit] Layers of hidden size 1024 wait for their launches.
  s.host_seconds = 42e-6;
  s.overlaps_gradients = false;
  s.overlaps_parameters = false;
  s.gradient_bytes = 2;
  s.accumulate_bytes = 7.5;  // [fit]
  // [fit] The part of a step that does not grow with the microbatches.
  s.optimizer_bytes = 35;
  s.loss_bytes = 30;  // [fit]
  s.blocking_transfers = true;
  s.scatters_transfers = true;
  s.memory = megatron_memory();
  return s;
}

/// The same as vTrain's authors profiled it (arXiv:2312.12391).
Framework megatron_vtrain() {
  Framework s = megatron_2021();
  s.name = "megatron-vtrain";
  s.pads_vocabulary = false;  // [fit] heads on one rank take thrice as long
  s.compute_share = 1;
  return s;
}

/// The fork that trained BLOOM: tried out with CUDA_LAUNCH_BLOCKING=1, without
/// which hundreds of devices hung (the authors' chronicles). Its
/// tensor-parallel sums are slow: [fit] to layouts that differ in tp alone.
Framework megatron_deepspeed() {
  Framework s = megatron_2021();
  s.name = "megatron-deepspeed";
  s.compute_share = 1;
  s.launches_wait = true;
  s.collective_share = 0.35;
  s.memory = deepspeed_memory();
  return s;
}

/// The same in bf16: 16-bit gradients are accumulated in 32 bits, which are not
/// sharded.
Framework megatron_deepspeed_bf16() {
  Framework s = megatron_deepspeed();
  s.name = "megatron-deepspeed-bf16";
  s.memory.gradient_bytes = 2 + 4;
  s.memory.master_gradient_bytes = 0;
  s.memory.buffer_bytes = 2 * 4 * 5e8;  // buckets in 32 bits, too
  return s;
}

/// Megatron-LM as of 2022 with sequence parallelism and selective recompute.
Framework megatron_2022() {
  Framework s = megatron_2021();
  s.name = "megatron-2022";
  s.compute_share = 1;
  s.hidden_backward_tensor_parallel = 0.5;
  s.accumulate_bytes = 6;
  return s;
}

/// Megatron-LM as of 2023 with nothing overlapped: the baseline of the
/// zero-bubble schedules.
Framework megatron_2023() {
  Framework s = megatron_2022();
  s.name = "megatron-2023";
  s.compute_share = 0.97;  // [fit]
  s.optimizer_bytes = 40;
  return s;
}

/// The authors' fork of it (arXiv:2401.10241), as it runs their own schedules.
Framework zero_bubble() {
  Framework s = megatron_2023();
  s.name = "zero-bubble";
  s.blocking_transfers = false;
  s.validates_afterwards = true;
  return s;
}

/// The same with the norm of all stages' gradients before the update.
Framework zero_bubble_synchronous() {
  Framework s = zero_bubble();
  s.name = "zero-bubble-synchronous";
  s.validates_afterwards = false;
  return s;
}

/// DeepSpeed's ZeRO stage 3 around Megatron-LM's layers.
Framework deepspeed() {
  Framework s = megatron_2021();
  s.name = "deepspeed";
  s.collective_share = 0.09;  // [fit] to arXiv:2104.04473, table 2
  s.overlaps_gradients = true;
  s.overlaps_parameters = true;
  s.gradient_bytes = 2;
  s.reduces_each_microbatch = true;
  s.memory = deepspeed_memory();
  return s;
}

/// Megatron core with Transformer Engine.
Framework megatron_core() {
  Framework s;
  s.name = "megatron-core";
  s.native_attention = true;
  s.host_seconds = 4e-6;
  s.step_host_seconds = 30e-3;
  s.gradient_bytes = 4;
  s.accumulate_bytes = 6;
  s.optimizer_bytes = 36;
  s.hidden_tensor_parallel = 0.9;
  s.hidden_backward_tensor_parallel = 0.9;
  s.memory = megatron_core_memory();
  s.compute_share = 0.88;
  s.overlap_slowdown = 0.01;
  s.quantise_bytes = 2;
  return s;
}

/// NeMo of 2023, before Transformer Engine overlapped collectives with matmuls.
Framework nemo_2023() {
  Framework s = megatron_core();
  s.name = "nemo-2023";
  s.native_attention = false;
  s.fused_attention = false;
  s.compute_share = 0.70;  // [fit] ddp_scaling's twelve rows of 5 and 175 B
  s.step_host_seconds = 12e-3;
  s.hidden_tensor_parallel = 0;
  s.hidden_backward_tensor_parallel = 0;
  return s;
}

/// Megatron core with Megatron-Bridge's recipes, NeMo containers 26.02
/// and 26.04. [fit] all: nemo_h100, nemo_other_gpus, dgxc_benchmarking's GB200.
Framework megatron_bridge() {
  Framework s = megatron_core();
  s.name = "megatron-bridge";
  s.compute_share = 0.83;
  s.hidden_expert_parallel = 0.3;
  s.host_seconds = 3e-6;
  s.quantise_bytes = 1;
  s.expert_share = 0.82;
  s.expert_host_seconds = 2.6e-3;
  return s;
}

/// Its containers of 2025: slower matmuls of experts, more host overhead.
Framework megatron_bridge_25() {
  Framework s = megatron_bridge();
  s.name = "megatron-bridge-25";
  s.expert_host_seconds = 3.3e-3;
  s.expert_share = 0.67;
  return s;
}

/// Containers since 26.06: layers of experts run without the host.
Framework megatron_bridge_26_06() {
  Framework s = megatron_bridge();
  s.name = "megatron-bridge-26.06";
  s.expert_host_seconds = 0.2e-3;
  return s;
}

// Frameworks that shard parameters
// ----------------------------------------------

FrameworkMemory echelon_memory() {
  return {
      .gated_kept = 4,
      .selective = SelectiveWay::keeps_products,
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

Framework echelon_trainer() {
  Framework s;
  s.name = "echelon";
  s.host_seconds = 3e-6;
  s.gathers_at_once = true;     // ShardedUnits::after_update
  s.bucket_bytes = 256 * 1024;  // as in gradient_reducer.h
  s.memory = echelon_memory();
  return s;
}

/// PyTorch's FullyShardedDataParallel.
Framework fsdp() {
  Framework s;
  s.name = "fsdp";
  s.host_seconds = 6e-6;
  s.gradient_bytes = 2;
  s.accumulate_bytes = 4;
  s.optimizer_bytes = 30;
  s.reduces_each_microbatch = true;
  s.memory = fsdp_memory();
  s.compute_share = 0.89;
  s.attention_speed = 0.69;
  s.overlap_slowdown = 0.55;
  s.step_host_seconds = 30e-3;
  return s;
}

/// torchtitan with torch.compile; FSDP 2 shards each parameter.
Framework torchtitan() {
  Framework s = fsdp();
  s.name = "torchtitan";
  s.compute_share = 0.78;
  s.attention_speed = 1;
  s.overlap_slowdown = 0.02;
  s.loss_bytes = 10;
  s.step_host_seconds = 10e-3;
  s.memory.logit_working_bytes = 8;  // the loss is one kernel
  return s;
}

/// Since April 2025 (its pull request 1033) the loss is compiled too: no logit
/// is ever in 32 bits.
Framework torchtitan_2025() {
  Framework s = torchtitan();
  s.name = "torchtitan-2025";
  s.memory.logit_kept_bytes = 2;
  s.memory.logit_working_bytes = 2;  // the gradient
  return s;
}

Framework torchtitan_eager() {
  Framework s = torchtitan();
  s.name = "torchtitan-eager";
  s.memory.logit_working_bytes = 10;
  s.fused_elementwise = false;
  return s;
}

/// Tensor-parallel collectives in pieces, overlapped with the matmuls.
Framework torchtitan_async_tp() {
  Framework s = torchtitan();
  s.name = "torchtitan-async-tp";
  s.hidden_tensor_parallel = 0.1;
  s.hidden_backward_tensor_parallel = 0.1;
  return s;
}

/// Compiled by XLA.
Framework maxtext() {
  Framework s = fsdp();
  s.name = "maxtext";
  s.native_attention = true;
  s.gradient_bytes = 4;
  s.reduces_each_microbatch = false;
  s.compute_share = 1.03;
  s.attention_speed = 1;
  s.overlap_slowdown = 0.1;
  return s;
}

Framework paxml() {
  Framework s = maxtext();
  s.name = "paxml";
  s.compute_share = 0.67;
  return s;
}

/// llm.c: handwritten kernels, one program per device.
Framework llm_c() {
  Framework s;
  s.name = "llm.c";
  s.host_seconds = 2e-6;
  s.gradient_bytes = 2;
  return s;
}

const std::vector<Framework>& frameworks() {
  static const std::vector<Framework> all = {
      echelon_trainer(),
      fsdp(),
      torchtitan(),
      torchtitan_2025(),
      torchtitan_eager(),
      torchtitan_async_tp(),
      maxtext(),
      paxml(),
      llm_c(),
      megatron_2021(),
      megatron_vtrain(),
      megatron_deepspeed(),
      megatron_deepspeed_bf16(),
      megatron_2022(),
      megatron_2023(),
      zero_bubble(),
      zero_bubble_synchronous(),
      deepspeed(),
      megatron_core(),
      nemo_2023(),
      megatron_bridge(),
      megatron_bridge_25(),
      megatron_bridge_26_06()};
  return all;
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
  std::string known;
  for (const std::string& one : framework_names()) {
    known += (known.empty() ? "" : ", ") + one;
  }
  throw ConfigError(format(
      "unknown stack \"{}\"; known: {}{}", name, known,
      config::did_you_mean(name, framework_names())));
}

}  // namespace echelon
