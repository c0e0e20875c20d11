// Settings of rotary positions: Su et al., "RoFormer", 2021, arXiv:2104.09864.
#pragma once

#include <compare>
#include <cstdint>

namespace echelon {

/// How frequencies change for texts that are longer than those a model was
/// trained on.
///
///   llama3  Pairs of features that turn less than low_freq_factor times within
///           original_positions are slowed down by `factor`, those that turn
///           more than high_freq_factor times are not, and between them the
///           change is smooth. Llama Team, 2024, arXiv:2407.21783.
///   yarn    The same with beta_slow and beta_fast turns, and a change that is
///           linear in the number of the pair. Cosines and sines are also
///           multiplied by attention_scale(). Peng et al., 2023,
///           arXiv:2309.00071.
///   linear  All are slowed down. Chen et al., 2023, arXiv:2306.15595.
enum class RopeScaling { llama3, yarn, linear };

struct RotaryOptions {
  double theta = 10000;
  RopeScaling scaling = RopeScaling::llama3;
  double factor = 0;  // 0: frequencies are not scaled
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  int64_t original_positions = 8192;
  double beta_fast = 32;
  double beta_slow = 1;
  double attention_factor = 0;  // 0: 0.1 ln(factor) + 1
  double mscale_all_dim = 0;    // 0: scores are not scaled

  auto operator<=>(const RotaryOptions&) const = default;

  /// What cosines and sines are multiplied by; 1 but for yarn.
  double attention_scale() const;
  /// What the scores of attention are multiplied by as well, with yarn:
  /// (0.1 mscale_all_dim ln(factor) + 1)^2.
  double score_scale() const;
};

}  // namespace echelon
