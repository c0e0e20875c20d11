// Rotary position embedding: rotates queries and keys by angles that grow with
// the position, so that their dot products depend only on distances.
//
// Follows Hugging Face's llama (rotate_half): features i and i + size / 2 of a
// head are a pair, rotated by position * theta^(-2 i / size). DeepSeek's pairs
// are features 2 i and 2 i + 1. Source: Su et al., "RoFormer", 2021,
// arXiv:2104.09864.
#pragma once

#include <torch/types.h>

#include <compare>
#include <cstdint>
#include <vector>

#include "echelon/layout/shard.h"

namespace echelon {

struct RotaryOptions {
  double theta = 10000;
  /// Scales frequencies for longer texts, as Llama 3.1 (rope_type "llama3" of a
  /// Hugging Face config.json); factor 0: no scaling. Pairs that rotate less
  /// than low_freq_factor times within original_positions are slowed down by
  /// `factor`, those above high_freq_factor are not, with a smooth transition.
  double factor = 0;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  int64_t original_positions = 8192;

  auto operator<=>(const RotaryOptions&) const = default;
};

/// Angular frequencies [head_size / 2], float32 on the CPU, computed in float32
/// as Hugging Face does. Throws ConfigError when head_size is odd.
torch::Tensor
rotary_frequencies(const RotaryOptions& options, int64_t head_size);

/// Cosines and sines of positions [first, first + count), in the requested
/// dtype, but float32 for float16 and bfloat16.
struct RotaryTable {
  torch::Tensor cosine;  // [count, head_size / 2]
  torch::Tensor sine;
};

/// A view of a table that is cached while the process lives: the longest one
/// requested so far for these options, size, device and dtype. Thread-safe.
RotaryTable rotary_table(
    const RotaryOptions& options, int64_t head_size, int64_t first,
    int64_t count, const torch::TensorOptions& like);

/// The same for some positions, one range after the other; a copy when there
/// are several ranges.
RotaryTable rotary_table(
    const RotaryOptions& options, int64_t head_size,
    const std::vector<IndexRange>& positions, const torch::TensorOptions& like);

/// Rotates each head of each position. float16 and bfloat16 are rotated in
/// float32.
///
///   x        [batch, positions, heads, head_size], any strides
///   pairs    features i and i + size / 2, or neighbours: 2 i and 2 i + 1
///   returns  a new tensor, contiguous
///
/// Differentiable (the gradient is rotated back), any number of times.
enum class RotaryPairs { halves, neighbours };
torch::Tensor rotate(
    const torch::Tensor& x, const RotaryTable& table,
    RotaryPairs pairs = RotaryPairs::halves);

/// Queries and keys, rotated as rotate() does, and values, copied: three
/// tensors of one new memory.
///
///   all  [batch, positions, heads, size], any strides: first the heads of
///        `queries`, then those of `keys`, then those of values
///
/// Differentiable any number of times; the gradient of `all` is one tensor.
std::vector<torch::Tensor> rotate_queries_and_keys(
    const torch::Tensor& all, int64_t queries, int64_t keys,
    const RotaryTable& table);

}  // namespace echelon
