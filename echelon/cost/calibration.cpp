#include "echelon/cost/calibration.h"

#include <algorithm>

#include "echelon/config/nearest.h"
#include "echelon/error.h"

// Sources. [mamf]: github.com/stas00/ml-engineering, best shapes found. [azure]:
// github.com/Azure/AI-benchmarking-guide. [nccl]: all-reduce tables of the two, of
// NVIDIA/dgxc-benchmarking and of VIA-Research/vTrain. [fit]: least squares on the
// logarithm of the steps in benchmarks/published, a third held out.

namespace echelon {
namespace {

struct NamedRates {
  std::string_view prefix;  // of the device's name
  DeviceRates rates;
};

DeviceRates a100() {
  DeviceRates r;
  r.matrix_share = 0.825;  // [fit]; [azure] 256 of 312 TFLOP/s at 16384^3
  r.attention_share = 0.58;  // [azure] FlashAttention 2: 180 of 312
  r.attention_backward_share = 0.50;
  r.memory_share = 0.86;  // [azure] streams 1.61 to 1.75 of 2.04 TB/s
  r.cache_bytes = 40e6;
  r.multiprocessors = 108;
  r.ring_share = 0.80;  // [nccl] 235 of 300 GB/s for 8, 197 for 2
  r.start_seconds = 13e-6;
  r.hop_seconds = 3e-6;
  r.fill_seconds = 110e-6;
  r.fill_bytes = 8e6;
  return r;
}

DeviceRates v100() {
  DeviceRates r;
  r.matrix_share = 0.75;
  r.attention_share = 0.4;
  r.attention_backward_share = 0.35;
  r.memory_share = 0.85;
  r.cache_bytes = 6e6;
  r.multiprocessors = 80;
  r.ring_share = 0.88;  // [nccl] 134 of 150 GB/s for 8
  return r;
}

DeviceRates h100() {
  DeviceRates r;
  r.matrix_share = 0.72;  // power limit; [mamf] 0.80 is the best shape
  r.matrix_share_fp8 = 0.68;
  r.attention_share = 0.43;  // [azure] FlashAttention 2: 328 of 989
  r.attention_backward_share = 0.22;
  r.native_attention_share = 0.73;
  r.native_attention_backward_share = 0.37;
  r.memory_share = 0.87;  // [azure] 2.9 of 3.35 TB/s
  r.cache_bytes = 50e6;
  r.multiprocessors = 132;
  r.ring_share = 0.84;    // [nccl] 366 of 450 GB/s
  r.switch_share = 1.07;  // [nccl] 480 of 450
  r.start_seconds = 11.5e-6;
  r.hop_seconds = 1e-6;
  r.fill_seconds = 95e-6;
  r.fill_bytes = 16e6;
  return r;
}

/// Of 500 W, with slower memory: torchtitan's benchmark pages.
DeviceRates h100_500w() {
  DeviceRates r = h100();
  r.matrix_share = 0.57;
  r.matrix_share_fp8 = 0.68;
  return r;
}

DeviceRates b200() {
  DeviceRates r = h100();
  r.matrix_share = 0.52;  // [mamf] 0.78
  r.matrix_share_fp8 = 0.63;
  r.memory_share = 0.85;
  r.cache_bytes = 126e6;
  r.multiprocessors = 148;
  r.ring_share = 0.80;    // [nccl] 682 of 900 GB/s
  r.switch_share = 0.94;  // [nccl] 846 of 900
  r.native_attention_share = 0.40;
  r.native_attention_backward_share = 0.45;
  return r;
}

DeviceRates b300() {
  DeviceRates r = b200();
  r.matrix_share_fp8 = 0.82;
  return r;
}

const std::vector<NamedRates>& named_rates() {
  static const std::vector<NamedRates> all = {
      {"v100", v100()}, {"a100", a100()}, {"h100-96gb", h100_500w()},
      {"h100", h100()}, {"h200", h100()},
      {"gh200", h100()}, {"b200", b200()}, {"b300", b300()}, {"gb200", b200()},
      {"gb300", b300()}};
  return all;
}

constexpr double kGiB = 1073741824.0;

// What stacks keep in memory: arXiv:2205.05198 for Megatron (32-bit gradients beside
// 16-bit weights, masters with the optimizer), documents and sources of the others;
// context, buffers and fragments [fit] to the memory in benchmarks/published.
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

StackMemory echelon_memory() {
  return {
      .gated_kept = 4,
      .selective = SelectiveWay::keeps_products,
      .context_bytes = 0.5 * kGiB,
      .fragment_share = 0.05};
}

/// Megatron-LM as of 2021: scores in memory, nothing beside computation.
Stack megatron_2021() {
  Stack s;
  s.name = "megatron-2021";
  s.fused_attention = false;
  s.dropout = true;
  s.compute_share = 0.94;  // [fit] to arXiv:2104.04473
  s.host_seconds = 39e-6;  // [fit] layers of hidden 1024 wait for their launches
  s.overlaps_gradients = false;
  s.overlaps_parameters = false;
  s.gradient_bytes = 2;
  s.accumulate_bytes = 7.5;  // [fit]
  s.optimizer_bytes = 35;    // [fit] steps' part that does not grow with microbatches
  s.loss_bytes = 30;         // [fit]
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

/// The fork that trained BLOOM; its tensor-parallel sums are slow: [fit] to layouts
/// that differ in tp alone.
Stack megatron_deepspeed() {
  Stack s = megatron_2021();
  s.name = "megatron-deepspeed";
  s.collective_share = 0.35;
  s.memory = deepspeed_memory();
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

/// The same in bf16: gradients of 16 bits are added up in 32, which are not cut.
Stack megatron_deepspeed_bf16() {
  Stack s = megatron_deepspeed();
  s.name = "megatron-deepspeed-bf16";
  s.memory.gradient_bytes = 2 + 4;
  s.memory.master_gradient_bytes = 0;
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

/// The authors' fork of Megatron-LM of 2023 (arXiv:2401.10241).
Stack zero_bubble() {
  Stack s = megatron_2022();
  s.name = "zero-bubble";
  s.blocking_transfers = false;
  s.optimizer_bytes = 40;
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

/// Megatron core with Megatron-Bridge's recipes, NeMo containers 26.02 and 26.04.
/// [fit] all: nemo_h100, nemo_other_gpus, dgxc_benchmarking's GB200.
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

Stack echelon_stack() {
  Stack s;
  s.name = "echelon";
  s.host_seconds = 3e-6;
  s.memory = echelon_memory();
  return s;
}

const std::vector<Stack>& stacks() {
  static const std::vector<Stack> all = {
      echelon_stack(), megatron_2021(), megatron_vtrain(), megatron_deepspeed(),
      megatron_2022(), megatron_core(),
      fsdp(), deepspeed(), zero_bubble(), llm_c(), megatron_bridge(),
      nemo_2023(), megatron_bridge_25(), megatron_bridge_26_06(), torchtitan(),
      torchtitan_eager(), torchtitan_async_tp(), maxtext(), paxml(),
      megatron_deepspeed_bf16()};
  return all;
}

/// What was measured is what there is: no share of it is lost, and nothing is added.
DeviceRates measured_rates() {
  return {
      .matrix_share = 1,
      .matrix_share_fp8 = 1,
      .memory_share = 1,
      .cache_bytes = 0,
      .cache_speedup = 1,
      .launch_seconds = 0,
      .ring_share = 1,
      .ring_ramp = 0,
      .switch_share = 1,
      .start_seconds = 0,
      .hop_seconds = 0,
      .fill_seconds = 0,
      .network_share = 1,
      .network_fill_seconds = 0};
}

}  // namespace

const DeviceRates& rates_of(const Device& device) {
  static const DeviceRates unknown;
  static const DeviceRates measured = measured_rates();
  if (device.measured()) return measured;
  for (const NamedRates& named : named_rates()) {
    if (device.name.starts_with(named.prefix)) return named.rates;
  }
  return unknown;
}

const std::vector<std::string>& stack_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const Stack& stack : stacks()) list.push_back(stack.name);
    return list;
  }();
  return names;
}

const Stack& find_stack(std::string_view name) {
  for (const Stack& stack : stacks()) {
    if (stack.name == name) return stack;
  }
  std::string known;
  for (const std::string& one : stack_names()) {
    known += (known.empty() ? "" : ", ") + one;
  }
  throw ConfigError(
      "unknown stack \"" + std::string(name) + "\"; known: " + known +
      config::did_you_mean(name, stack_names()));
}

}  // namespace echelon
