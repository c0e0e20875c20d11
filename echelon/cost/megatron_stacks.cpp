#include "echelon/cost/known_stacks.h"

// Megatron-LM through its years, and what is built around its layers.
// [fit]: least squares on the logarithm of the steps in benchmarks/published, a
// third held out. What stacks keep in memory: arXiv:2205.05198 for Megatron
// (32-bit gradients beside 16-bit weights, masters with the optimizer),
// documents and sources of the others; context, buffers and fragments [fit] to
// the memory in benchmarks/published.

namespace echelon {
namespace {

constexpr double kGiB = 1073741824.0;

StackMemory megatron_memory() {
  return {
      .gated_kept = 4,
      .selective = SelectiveWay::attention_scores,
      .masters_beside = true,
      .gradient_bytes = 4,
      .context_bytes = 1.0 * kGiB};
}

// Transformer Engine's kernels; gradients are summed in 16 bits.
StackMemory megatron_core_memory() {
  return {
      .gated_kept = 3,
      .selective = SelectiveWay::attention_scores,
      .masters_beside = true,
      .gradient_bytes = 2,
      .shards_over_cp = true,
      .logit_working_bytes = 10,
      .context_bytes = 1.0 * kGiB};
}

// Gradients in 16 bits, the optimizer's part of them in 32; two buckets of 5e8.
StackMemory deepspeed_memory() {
  StackMemory memory = megatron_memory();
  memory.gradient_bytes = 2;
  memory.master_gradient_bytes = 4;
  memory.buffer_bytes = 2 * 2 * 5e8;
  memory.context_bytes = 4.0 * kGiB;
  memory.fragment_share = 0.3;
  return memory;
}

/// Megatron-LM as of 2021: scores in memory, nothing beside computation.
Stack megatron_2021() {
  Stack s;
  s.name = "megatron-2021";
  s.fused_attention = false;
  s.dropout = true;
  s.compute_share = 0.94;  // [fit] to arXiv:2104.04473
  s.host_seconds =
      42e-6;  // [fit] layers of hidden 1024 wait for their launches
  s.overlaps_gradients = false;
  s.overlaps_parameters = false;
  s.gradient_bytes = 2;
  s.accumulate_bytes = 7.5;  // [fit]
  s.optimizer_bytes =
      35;             // [fit] steps' part that does not grow with microbatches
  s.loss_bytes = 30;  // [fit]
  s.blocking_transfers = true;
  s.scatters_transfers = true;
  s.memory = megatron_memory();
  return s;
}

/// The same as vTrain's authors profiled it (arXiv:2312.12391).
Stack megatron_vtrain() {
  Stack s = megatron_2021();
  s.name = "megatron-vtrain";
  s.pads_vocabulary = false;  // [fit] heads on one rank take thrice as long
  s.compute_share = 1;
  return s;
}

/// The fork that trained BLOOM: tried out with CUDA_LAUNCH_BLOCKING=1, without
/// which hundreds of devices hung (the authors' chronicles). Its
/// tensor-parallel sums are slow: [fit] to layouts that differ in tp alone.
Stack megatron_deepspeed() {
  Stack s = megatron_2021();
  s.name = "megatron-deepspeed";
  s.compute_share = 1;
  s.launches_wait = true;
  s.collective_share = 0.35;
  s.memory = deepspeed_memory();
  return s;
}

/// The same in bf16: gradients of 16 bits are added up in 32, which are not
/// cut.
Stack megatron_deepspeed_bf16() {
  Stack s = megatron_deepspeed();
  s.name = "megatron-deepspeed-bf16";
  s.memory.gradient_bytes = 2 + 4;
  s.memory.master_gradient_bytes = 0;
  s.memory.buffer_bytes =
      2 * 4 * 5e8;  // buckets of what is summed: 32 bits, too
  return s;
}

/// Megatron-LM as of 2022 with sequence parallelism and selective recompute.
Stack megatron_2022() {
  Stack s = megatron_2021();
  s.name = "megatron-2022";
  s.compute_share = 1;
  s.hidden_backward_tensor_parallel = 0.5;
  s.accumulate_bytes = 6;
  return s;
}

/// Megatron-LM as of 2023, with nothing beside computation: what zero-bubble
/// schedules were compared with.
Stack megatron_2023() {
  Stack s = megatron_2022();
  s.name = "megatron-2023";
  s.compute_share = 0.97;  // [fit]
  s.optimizer_bytes = 40;
  return s;
}

/// The authors' fork of it (arXiv:2401.10241), as it runs their own schedules.
Stack zero_bubble() {
  Stack s = megatron_2023();
  s.name = "zero-bubble";
  s.blocking_transfers = false;
  s.validates_afterwards = true;
  return s;
}

/// The same with the norm of all stages' gradients before the update.
Stack zero_bubble_synchronous() {
  Stack s = zero_bubble();
  s.name = "zero-bubble-synchronous";
  s.validates_afterwards = false;
  return s;
}

/// DeepSpeed's ZeRO stage 3 around Megatron-LM's layers.
Stack deepspeed() {
  Stack s = megatron_2021();
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
Stack megatron_core() {
  Stack s;
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

/// NeMo of 2023, before Transformer Engine's collectives beside products.
Stack nemo_2023() {
  Stack s = megatron_core();
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
Stack megatron_bridge() {
  Stack s = megatron_core();
  s.name = "megatron-bridge";
  s.compute_share = 0.83;
  s.hidden_expert_parallel = 0.3;
  s.host_seconds = 3e-6;
  s.quantise_bytes = 1;
  s.expert_share = 0.82;
  s.expert_host_seconds = 2.6e-3;
  return s;
}

/// Its containers of 2025: experts' products are slower, and their host.
Stack megatron_bridge_25() {
  Stack s = megatron_bridge();
  s.name = "megatron-bridge-25";
  s.expert_host_seconds = 3.3e-3;
  s.expert_share = 0.67;
  return s;
}

/// Containers since 26.06: layers of experts run without the host.
Stack megatron_bridge_26_06() {
  Stack s = megatron_bridge();
  s.name = "megatron-bridge-26.06";
  s.expert_host_seconds = 0.2e-3;
  return s;
}

}  // namespace

std::vector<Stack> megatron_stacks() {
  return {megatron_2021(),      megatron_vtrain(),
          megatron_deepspeed(), megatron_deepspeed_bf16(),
          megatron_2022(),      megatron_2023(),
          zero_bubble(),        zero_bubble_synchronous(),
          deepspeed(),          megatron_core(),
          nemo_2023(),          megatron_bridge(),
          megatron_bridge_25(), megatron_bridge_26_06()};
}

}  // namespace echelon
