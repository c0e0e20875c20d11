// Rotary position embedding: rotates queries and keys by angles that grow with
// the position, so that their dot products depend only on distances.
//
// Follows Hugging Face's llama (rotate_half): features i and i + size / 2 of a
// head are a pair, rotated by position * theta^(-2 i / size). DeepSeek's pairs
// are features 2 i and 2 i + 1. Source: Su et al., "RoFormer", 2021,
// arXiv:2104.09864.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <vector>

#include "echelon/layout/shard.h"
#include "echelon/options/rotary.h"

namespace echelon {

/// Angular frequencies [head_size / 2], float32 on the CPU, computed in float32
/// as Hugging Face does. Throws ConfigError when head_size is odd.
torch::Tensor
rotary_frequencies(const RotaryOptions& options, int64_t head_size);

/// Cosines and sines of positions [first, first + count), times
/// options.attention_scale(), in the requested dtype, but float32 for float16
/// and bfloat16.
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
