// Settings of mixed precision.
//
// Source: Micikevicius et al., "Mixed precision training", 2018,
// arXiv:1710.03740.
#pragma once

#include <cstdint>
#include <string>

namespace echelon {

/// The type of forward and backward: parameters as layers see them,
/// activations and gradients. Norms, softmax and losses are always summed in
/// float32.
enum class ComputeDtype {
  automatic,  // bf16 on GPUs that have it, else same (job/compute_dtype.h)
  same,       // model.dtype
  tf32,       // float32, whose products GPUs round to TF32
  bf16,
  fp16,
  fp8,  // bf16, with products of linear layers in 8 bits on GPUs
};

/// Whether layers have other parameters than the optimizer, of 16 bits.
inline bool in_16_bits(ComputeDtype compute) {
  return compute == ComputeDtype::bf16 || compute == ComputeDtype::fp16 ||
         compute == ComputeDtype::fp8;
}

/// The type in which gradients are summed over ranks. same: as they are.
enum class ReduceDtype { same, float32, bf16 };

/// Their names in a configuration.
std::string to_string(ComputeDtype compute);
std::string to_string(ReduceDtype reduce);

/// Master parameters and the optimizer's state always have model.dtype.
struct PrecisionOptions {
  ComputeDtype compute = ComputeDtype::automatic;
  ReduceDtype reduce = ReduceDtype::same;
  /// The factor of the loss before backward. 0: as large as gradients allow for
  /// fp16, else 1.
  double loss_scale = 0;
  double initial_loss_scale = 65536;  // where the search for a scale starts
  int64_t loss_scale_growth = 2000;   // steps without overflow until it doubles
  int64_t max_overflows = 20;         // skipped steps in a row until it stops

  bool operator==(const PrecisionOptions&) const = default;
};

}  // namespace echelon
