// Tensor parallelism: each layer's matrices are sharded over the ranks of a
// group, which compute one layer together.
//
//   TensorParallel parallel{.group = world.new_group("tp", {0, 1})};
//   GatedMlp mlp({.hidden = 512, .intermediate = 1376}, parallel, "mlp");
//   y = mlp.forward(x, tokens);          // on every rank of the group
//
// Activations between layers are in one of two states, the same on all ranks:
//
//   replicated         every rank holds all of x [batch, sequence, hidden]
//   sequence parallel  rank r holds shard r of the tokens, [tokens_r, hidden]:
//                      the batch * sequence tokens, sample after sample, are
//                      sharded by even_range (layout/shard.h)
//
// A tensor-parallel region begins with a column-parallel matmul, which needs
// all tokens and leaves each rank some of the features. It ends with a
// row-parallel matmul, whose results are sums over the ranks.
//
// Loss convention: all ranks of the group compute the same loss. A replicated
// tensor has the same gradient on every rank; a sharded tensor has the gradient
// of the shard on this rank.
//
// Labels of collectives, in the timeline and in errors, are "<layer> <what>",
// where <layer> is the name of a module, or of the matrices that share an input
// ("transformer.h.0.attn.c_attn", "model.layers.3.mlp.gate_up_proj"), and
// <what> is
//
//   gather          all-gathers tokens or features in forward, and again in
//                   backward where it needs them
//   sum             all-reduces partial results
//   scatter         reduce-scatters partial results: each rank gets its tokens
//   input gradient  sums the gradient of a region's input in backward
//   loss, argmax    reduces over the vocabulary (lm_head)
//
// <layer> is "shared_gradients" for the collectives of shared_gradients.h. It
// has no blanks: <what> follows the first one.
//
// Sources: Shoeybi et al., "Megatron-LM", 2019, arXiv:1909.08053; Korthikanti
// et al., "Reducing Activation Recomputation in Large Transformer Models",
// 2022, arXiv:2205.05198.
#pragma once

#include <algorithm>
#include <cstdint>

#include "echelon/comm/group.h"
#include "echelon/layout/shard.h"
#include "echelon/options/tensor.h"
#include "echelon/parallel/context/context_parallel.h"

namespace echelon {

/// What a tensor-parallel layer is built with. Copies share the group. The
/// default is one rank, which computes the plain layer at no cost.
struct TensorParallel {
  Group group = Group::alone("tp");
  TensorParallelOptions options;
  /// The ranks that hold the other parts of each sequence. They have the same
  /// shards of parameters, and layers are given this rank's tokens.
  ContextParallel context;
  /// The ranks that share out the experts of a mixture; each has samples of its
  /// own (parallel/expert/).
  Group experts = Group::alone("ep");
  /// Linear layers multiply in 8 bits (fp8.h); other products keep the dtype of
  /// their matrices.
  bool fp8 = false;
  /// Documents may have borders that attention respects. Otherwise they are
  /// zeros, which tell layers the shape of the tokens, and no host reads them.
  bool document_borders = true;

  int rank() const { return group.rank(); }
  int size() const { return group.size(); }
  /// Whether tokens are sharded between the layers: with the option
  /// sequence_parallel and more than one rank.
  bool splits_tokens() const { return options.sequence_parallel && size() > 1; }
  /// How many chunks a matmul has: one where nothing chose.
  int64_t chunks() const {
    return std::max<int64_t>(1, options.overlap_chunks);
  }
  /// This rank's even share of `total` indices.
  IndexRange part_of(int64_t total) const {
    return even_range(total, rank(), size());
  }
};

}  // namespace echelon
