// Context parallelism: each rank of a group holds a part of every sequence.
// All layers but attention work on single tokens and need nothing of the other
// ranks; attention is in attention.h.
//
// A causal query attends to the keys before it, so the last tokens of a
// sequence cost most. The sequence is therefore cut into two pieces for each
// rank, and rank r has pieces r and 2 * ranks - 1 - r (zig-zag): each rank has
// as much work. With three ranks:
//
//   piece    0  1  2  3  4  5
//   rank     0  1  2  2  1  0
//
// Pieces differ by at most one token, so any sequence of at least as many
// tokens as ranks can be cut. The pieces of neighbouring ranks are neighbours:
// a group of them that brings its tokens together has two pieces, too.
//
// Loss convention: each rank has the loss of its own tokens, and the ranks
// together differentiate the sum ("sum of losses" in comm/differentiable.h).
// Parameters are the same on all ranks of the group; their gradients are terms
// of a sum, as those of data-parallel ranks.
//
// Sources: Liu et al., "Ring Attention", 2023, arXiv:2310.01889; Brandon et
// al., "Striped Attention", 2023, arXiv:2311.09431; the zig-zag order: Llama
// Team, "The Llama 3 Herd of Models", 2024, arXiv:2407.21783, section 3.3.2.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <vector>

#include "echelon/comm/group.h"
#include "echelon/layout/shard.h"
#include "echelon/options/context.h"

namespace echelon {

/// Zig-zag cuts of sequences over `ranks`, in parts that `neighbours` of them
/// hold together.
struct SequenceCut {
  int64_t ranks = 1;
  int64_t neighbours = 1;  // divides `ranks`

  int64_t parts() const { return ranks / neighbours; }
  /// The positions of a part's tokens in a sequence of `sequence` tokens,
  /// ascending: two ranges, of which either may be empty. The only part has one
  /// range.
  std::vector<IndexRange> pieces_of(int64_t sequence, int64_t part) const;
  /// How many tokens a part has.
  int64_t length_of(int64_t sequence, int64_t part) const;
  /// The lengths of all parts.
  std::vector<int64_t> lengths_of(int64_t sequence) const;
};

/// What layers are built with. Copies share the groups. The default is one
/// rank, which has whole sequences.
struct ContextParallel {
  ContextParallel() = default;
  /// For every way but ulysses_ring, which needs the groups below.
  ContextParallel(const Group& all, const ContextParallelOptions& options);
  /// `heads` and `keys` are those of MeshGroups, for head_ranks(options).
  ContextParallel(
      const Group& all, const ContextParallelOptions& options,
      const Group& heads, const Group& keys);
  /// As Group::silent.
  static ContextParallel
  silent(int rank, int size, const ContextParallelOptions& options);

  Group group = Group::alone("cp");
  ContextParallelOptions options;
  /// The neighbours with which this rank exchanges heads for tokens, and the
  /// ranks with which it then exchanges keys and values.
  Group heads = Group::alone("cp");
  Group keys = Group::alone("cp");

  int rank() const { return group.rank(); }
  int size() const { return group.size(); }
  bool is_used() const { return size() > 1; }

  SequenceCut cut_of_ranks() const { return {size(), 1}; }
  /// Of the ranks of `keys`, after an exchange of heads.
  SequenceCut cut_of_groups() const { return {size(), heads.size()}; }

  /// The positions of a rank's tokens, in the order in which it holds them.
  std::vector<IndexRange> pieces_of(int64_t sequence, int rank) const {
    return cut_of_ranks().pieces_of(sequence, rank);
  }
  std::vector<IndexRange> pieces_of(int64_t sequence) const {
    return pieces_of(sequence, rank());
  }
  /// How many tokens this rank has.
  int64_t length_of(int64_t sequence) const {
    return cut_of_ranks().length_of(sequence, rank());
  }

  /// This rank's part of a tensor with whole sequences along `dim`; x itself
  /// with one rank. Throws ConfigError for fewer tokens than ranks.
  torch::Tensor cut(const torch::Tensor& x, int64_t dim) const;
};

/// The rows of x along `dim` at these positions, one range after the other.
torch::Tensor rows_at(
    const torch::Tensor& x, int64_t dim, const std::vector<IndexRange>& pieces);

}  // namespace echelon
