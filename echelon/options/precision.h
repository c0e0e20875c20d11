// Settings of mixed precision. Free of LibTorch: the command line checks them.
// Source: Micikevicius et al., "Mixed precision training", 2018,
// arXiv:1710.03740.
#pragma once

#include <cstdint>
#include <string>

namespace echelon {

namespace config {
class Section;
}

/// Master parameters and the optimizer's state have model.dtype always.
struct PrecisionOptions {
  /// Of forward and backward: parameters as layers see them, activations,
  /// gradients. Norms, softmax and losses are summed in float32 whatever it is.
  ///   same   model.dtype
  ///   bf16, fp16
  std::string compute = "same";
  /// In which gradients are summed over ranks: same (as they are), float32,
  /// bf16.
  std::string reduce = "same";
  /// What the loss is multiplied by before backward. 0: for fp16 as large as
  /// gradients allow, else 1.
  double loss_scale = 0;
  double initial_loss_scale = 65536;  // of a scale that is found
  int64_t loss_scale_growth = 2000;   // steps without overflow until it doubles
  int64_t max_overflows = 20;         // skipped steps in a row until it stops

  bool operator==(const PrecisionOptions&) const = default;
};

void bind(config::Section& section, PrecisionOptions& options);  // [precision]

}  // namespace echelon
