// Tensor parallelism: each layer's matrices are cut over the ranks of a group,
// which compute one layer together.
//
// Activations between layers are in one of two states, the same on all ranks:
//
//   replicated         every rank holds all of x [batch, sequence, hidden]
//   sequence parallel  rank r holds part r of the tokens, x [tokens_r, hidden]:
//                      the batch's batch * sequence tokens in one row, sample
//                      after sample, cut by even_range (layout/shard.h)
//
// A tensor-parallel region begins with a column-parallel product, which needs
// all tokens and leaves each rank some of the features, and ends with a
// row-parallel one, whose results are sums over the ranks.
//
// Loss convention: all ranks of the group compute one loss, with one value.
// What is replicated has the same gradient on every rank; what is cut has the
// gradient of the part that is here.
//
// Labels of collectives, which the timeline and errors show: "<layer> <what>",
// where <layer> is the name of a module or of the matrices that share an input
// ("transformer.h.0.attn.c_attn", "model.layers.3.mlp.gate_up_proj"), and what
// is
//
//   gather          tokens or features are gathered: in forward, and what
//                   backward needs of them again
//   sum, scatter    partial results are summed: on all ranks, or each its
//   tokens input gradient  the gradient of what entered a region, summed in
//   backward loss, argmax    over the vocabulary (lm_head)
//
// and <layer> is "shared_gradients" for those of shared_gradients.h. A <layer>
// has no blanks: what follows the first one is <what>.
//
// Sources: Shoeybi et al., "Megatron-LM", 2019, arXiv:1909.08053; Korthikanti
// et al., "Reducing Activation Recomputation in Large Transformer Models",
// 2022, arXiv:2205.05198.
#pragma once

#include <cstdint>

#include "echelon/comm/group.h"
#include "echelon/layout/shard.h"
#include "echelon/options/tensor.h"

namespace echelon {

/// What a tensor-parallel layer is built with. A value; copies share the group.
/// By default one rank, which computes the plain layer at no cost.
struct TensorParallel {
  Group group = Group::alone("tp");
  TensorParallelOptions options;

  int rank() const { return group.rank(); }
  int size() const { return group.size(); }
  /// Whether tokens are cut between the layers: asked for, and more than one
  /// rank.
  bool cuts_tokens() const { return options.sequence_parallel && size() > 1; }
  /// This rank's part of `total` things, cut evenly.
  IndexRange part_of(int64_t total) const {
    return even_range(total, rank(), size());
  }
};

}  // namespace echelon
