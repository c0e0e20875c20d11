// Causal attention over sequences that are cut over ranks (context_parallel.h).
//
//   ring        Keys and values pass from rank to rank. Each rank attends to
//               one block of them while the next is on its way, and merges the
//               results by their log-sum-exp (online softmax). Backward passes
//               the blocks round once more, and their gradients behind them.
//               Liu et al., 2023, arXiv:2310.01889.
//   all_gather  Each rank all-gathers keys and values, also in backward, where
//               it reduce-scatters their gradients. One collective in place of
//               many messages; a layer's keys and values of whole sequences
//               are held while it computes. Llama Team, 2024, arXiv:2407.21783.
//   ulysses     An all-to-all gives each rank whole sequences of some of the
//               heads, and a second one brings the results back. It sends the
//               least, and needs a head for each rank. Jacobs et al.,
//               "DeepSpeed Ulysses", 2023, arXiv:2309.14509.
//   ulysses_ring  Groups of neighbours exchange heads for tokens, as in
//               `ulysses`; keys and values of these heads then pass round the
//               groups, as in `ring`: for more ranks than heads. Fang and Zhao,
//               "USP", 2024, arXiv:2405.07719.
//
// All compute the same and keep only this rank's part for backward.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "echelon/layout/shard.h"
#include "echelon/parallel/context/context_parallel.h"

namespace echelon {

/// Which probabilities dropout keeps: bool, of the shape of `like` [batch,
/// heads, queries, keys], for the query heads that begin at `first_head` (of
/// those of the call) and for these positions. It is asked again in backward.
using KeptProbabilities = std::function<torch::Tensor(
    const torch::Tensor& like, int64_t first_head, const IndexRange& queries,
    const IndexRange& keys)>;

struct ContextAttentionCall {
  int64_t sequence = 0;  // tokens of whole sequences
  /// The head of keys and values that each query head uses, ascending.
  std::vector<int64_t> kv_of_query;
  /// int64 [batch, sequence], whole: tokens attend to their own document.
  /// Undefined: sequences are one document each.
  torch::Tensor documents;
  /// Tokens that a query attends to, itself and those before it; 0: all.
  int64_t window = 0;
  double scale = 0;    // of scores; 0: 1 / sqrt(size)
  double softcap = 0;  // scores s become cap tanh(s / cap); 0: they stay
  double dropout = 0;  // of probabilities
  KeptProbabilities kept = nullptr;  // needed with dropout
  std::string label;                 // of the collectives

  /// Whether the window hides any token.
  bool is_windowed() const { return window > 0 && window < sequence; }
};

/// Attention of this rank's queries to all earlier positions.
///
///   query    [batch, tokens_r, heads, size]
///   key      [batch, tokens_r, kv_heads, size], and value
///   returns  [batch, tokens_r, heads, size]
///
/// Every rank of the group calls this. Blocks without a mask use the fused
/// kernel of CPUs; with documents, a window, a softcap or dropout, and on other
/// devices, matrices of scores are made a few rows at a time. Blocks in which
/// no query sees a key are skipped. Throws ConfigError when heads are exchanged
/// between more ranks than there are heads. Its backward cannot be
/// differentiated again, except that of the all-to-all.
torch::Tensor context_attention(
    const torch::Tensor& query, const torch::Tensor& key,
    const torch::Tensor& value, const ContextParallel& context,
    const ContextAttentionCall& call);

namespace detail {

/// A rectangle of scores: some rows of a rank's queries and of a block of keys.
struct ScoreBlock {
  IndexRange rows;     // of the queries here
  IndexRange columns;  // of the block's keys
  IndexRange queries;  // positions of the rows, where they follow each other
  IndexRange keys;     // positions of the columns, where they do
  /// A row sees columns up to its own position (row i up to column i where no
  /// positions are given); else all.
  bool causal = false;
};

/// The rectangles in which queries at `queries` see keys at `keys`, both
/// ascending pieces of one cut. `merged`: as few as possible, whose positions
/// are then not given; a rank's own keys are one causal rectangle.
std::vector<ScoreBlock> score_blocks(
    const std::vector<IndexRange>& queries, const std::vector<IndexRange>& keys,
    bool merged);

/// What is left of these rectangles, which have positions, where a query sees
/// `window` tokens: some rows at a time, and of the columns those that one of
/// them sees.
std::vector<ScoreBlock>
within_window(const std::vector<ScoreBlock>& blocks, int64_t window);

}  // namespace detail
}  // namespace echelon
