#include "echelon/cost/device_rates.h"

#include <string_view>
#include <vector>

// Sources. [mamf]: github.com/stas00/ml-engineering, best shapes found.
// [azure]: github.com/Azure/AI-benchmarking-guide. [nccl]: all-reduce tables of
// the two, of NVIDIA/dgxc-benchmarking and of VIA-Research/vTrain. [fit]: least
// squares on the logarithm of the steps in benchmarks/published, a third held
// out.

namespace echelon::cost {
namespace {

DeviceRates a100() {
  DeviceRates r;
  r.matrix_share = 0.84;     // [fit]; [azure] 256 of 312 TFLOP/s at 16384^3
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
  r.matrix_share = 0.765;
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
  r.matrix_share = 0.735;  // power limit; [mamf] 0.80 is the best shape
  r.matrix_share_fp8 = 0.695;
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

/// The H100 with a limit of 500 W and slower memory, as in torchtitan's
/// benchmark pages.
DeviceRates h100_500w() {
  DeviceRates r = h100();
  r.matrix_share = 0.58;
  r.matrix_share_fp8 = 0.695;
  return r;
}

DeviceRates b200() {
  DeviceRates r = h100();
  r.matrix_share = 0.62;  // [mamf] 0.78
  r.matrix_share_fp8 = 0.645;
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
  r.matrix_share_fp8 = 0.835;
  return r;
}

struct NamedRates {
  std::string_view device;  // of the catalogue
  DeviceRates rates;
};

const std::vector<NamedRates>& named_rates() {
  static const std::vector<NamedRates> all = {
      {"v100", v100()},      {"v100-16gb", v100()}, {"a100-40gb", a100()},
      {"a100-80gb", a100()}, {"h100-sxm", h100()},  {"h100-96gb", h100_500w()},
      {"h100-pcie", h100()}, {"h200", h100()},      {"gh200", h100()},
      {"b200", b200()},      {"gb200", b200()},     {"b300", b300()},
      {"gb300", b300()}};
  return all;
}

/// Measured rates are already what a device reaches: nothing is taken off them,
/// and nothing is added.
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

const DeviceRates& rates_of(const cluster::Device& device) {
  static const DeviceRates unknown;
  static const DeviceRates measured = measured_rates();
  if (device.measured()) return measured;
  const std::string& kind = device.like.empty() ? device.name : device.like;
  for (const NamedRates& named : named_rates()) {
    if (kind == named.device) return named.rates;
  }
  return unknown;
}

}  // namespace echelon::cost
