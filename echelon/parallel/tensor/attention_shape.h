// Numbers of an attention layer, and which degrees of tensor parallelism they
// allow. Free of LibTorch: the command line checks them before any rank starts.
#pragma once

#include <cstdint>

#include "echelon/layout/shard.h"

namespace echelon {

struct AttentionShape {
  int64_t hidden = 1;     // features of a token
  int64_t heads = 1;      // of queries
  int64_t kv_heads = 0;   // of keys and values, which divide `heads`; 0: heads
  int64_t head_size = 0;  // features of a head; 0: hidden / heads

  int64_t num_kv_heads() const { return kv_heads > 0 ? kv_heads : heads; }
  int64_t size_of_head() const {
    return head_size > 0 ? head_size : hidden / heads;
  }
  /// Heads of queries that share a head of keys and values.
  int64_t group() const { return heads / num_kv_heads(); }
};

/// Throws ConfigError, with the numbers and those that would fit, when heads do
/// not divide `hidden` (unless head_size is given), when kv_heads do not divide
/// heads, or when there are more than `heads` tensor-parallel ranks.
void check_attention(const AttentionShape& shape, int64_t tp);

/// The heads of rank `rank` of `tp`.
struct AttentionHeads {
  IndexRange query;     // an even part
  IndexRange kv;        // those that these queries use, maybe also other ranks'
  IndexRange kv_owned;  // of them, those that no rank before this one has
  /// Whether some head of keys and values lies on more than one rank; the same
  /// on every rank.
  bool shares_kv = false;
  /// Whether each head of `kv` serves as many heads of `query`.
  bool uniform = true;
};

/// Expects check_attention to have passed.
AttentionHeads heads_of(const AttentionShape& shape, int64_t rank, int64_t tp);

}  // namespace echelon
