#include "echelon/cost/known_stacks.h"

// Stacks whose parameters are sharded, first of all this project's own trainer.
// [fit]: least squares on the logarithm of the steps in benchmarks/published, a
// third held out. What stacks keep in memory: arXiv:2205.05198 for Megatron
// (32-bit gradients beside 16-bit weights, masters with the optimizer),
// documents and sources of the others; context, buffers and fragments [fit] to
// the memory in benchmarks/published.

namespace echelon {
namespace {

constexpr double kGiB = 1073741824.0;

StackMemory echelon_memory() {
  return {
      .gated_kept = 4,
      .selective = SelectiveWay::keeps_products,
      .context_bytes = 0.5 * kGiB,
      .fragment_share = 0.05};
}

StackMemory fsdp_memory() {
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

Stack echelon_stack() {
  Stack s;
  s.name = "echelon";
  s.host_seconds = 3e-6;
  s.gathers_at_once = true;  // ShardedUnits::after_update
  s.bucket_bytes =
      256 * 1024;  // smaller gradients are collected (gradient_reducer.h)
  s.memory = echelon_memory();
  return s;
}

/// PyTorch's FullyShardedDataParallel.
Stack fsdp() {
  Stack s;
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
Stack torchtitan() {
  Stack s = fsdp();
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
Stack torchtitan_2025() {
  Stack s = torchtitan();
  s.name = "torchtitan-2025";
  s.memory.logit_kept_bytes = 2;
  s.memory.logit_working_bytes = 2;  // the gradient
  return s;
}

Stack torchtitan_eager() {
  Stack s = torchtitan();
  s.name = "torchtitan-eager";
  s.memory.logit_working_bytes = 10;
  s.fused_elementwise = false;
  return s;
}

/// Tensor-parallel collectives in pieces, beside the products.
Stack torchtitan_async_tp() {
  Stack s = torchtitan();
  s.name = "torchtitan-async-tp";
  s.hidden_tensor_parallel = 0.1;
  s.hidden_backward_tensor_parallel = 0.1;
  return s;
}

/// Compiled by XLA.
Stack maxtext() {
  Stack s = fsdp();
  s.name = "maxtext";
  s.native_attention = true;
  s.gradient_bytes = 4;
  s.reduces_each_microbatch = false;
  s.compute_share = 1.03;
  s.attention_speed = 1;
  s.overlap_slowdown = 0.1;
  return s;
}

Stack paxml() {
  Stack s = maxtext();
  s.name = "paxml";
  s.compute_share = 0.67;
  return s;
}

/// llm.c: kernels by hand, one program per device.
Stack llm_c() {
  Stack s;
  s.name = "llm.c";
  s.host_seconds = 2e-6;
  s.gradient_bytes = 2;
  return s;
}

}  // namespace

std::vector<Stack> sharded_stacks() {
  return {
      echelon_stack(),
      fsdp(),
      torchtitan(),
      torchtitan_2025(),
      torchtitan_eager(),
      torchtitan_async_tp(),
      maxtext(),
      paxml(),
      llm_c()};
}

}  // namespace echelon
