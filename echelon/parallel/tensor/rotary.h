// Rotary position embedding: queries and keys are turned by angles that grow
// with the position, so that their products depend on distances alone.
//
// Convention of Hugging Face's llama (rotate_half): features i and i + size / 2
// of a head are one pair, turned by position * theta^(-2 i / size).
// Source: Su et al., "RoFormer", 2021, arXiv:2104.09864.
#pragma once

#include <torch/types.h>

#include <cstdint>

namespace echelon {

struct RotaryOptions {
  double theta = 10000;
  /// Frequencies stretched for longer texts, as Llama 3.1 has them (rope_type
  /// "llama3" of a Hugging Face config.json); factor 0: not stretched. Pairs
  /// that turn less than low_freq_factor times within original_positions are
  /// slowed by `factor`, those above high_freq_factor not, between them
  /// smoothly.
  double factor = 0;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  int64_t original_positions = 8192;

  bool operator==(const RotaryOptions&) const = default;
};

/// Angular frequencies [head_size / 2], float32 on the CPU, computed in float32
/// as Hugging Face does. Throws ConfigError when head_size is odd.
torch::Tensor
rotary_frequencies(const RotaryOptions& options, int64_t head_size);

/// Cosines and sines of positions [first, first + count): of the dtype that was
/// asked for, but float32 for float16 and bfloat16.
struct RotaryTable {
  torch::Tensor cosine;  // [count, head_size / 2]
  torch::Tensor sine;
};

/// Tables are kept for as long as the process lives, one per options, size,
/// device and dtype: views of the longest one asked for. Thread-safe.
RotaryTable rotary_table(
    const RotaryOptions& options, int64_t head_size, int64_t first,
    int64_t count, const torch::TensorOptions& like);

/// Turns each head of each position. float16 and bfloat16 are turned in
/// float32.
///
///   x        [batch, positions, heads, head_size], any strides
///   returns  a new tensor, contiguous
///
/// Differentiable (the gradient is turned back), any number of times.
torch::Tensor rotate(const torch::Tensor& x, const RotaryTable& table);

}  // namespace echelon
