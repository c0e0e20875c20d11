// All-gather and reduce-scatter of sharded tokens, chunk by chunk. For the .cpp
// files of this folder; without autograd.
//
// Rank r has shard r of the tokens, which is split into `chunks` chunks.
// Collective c transfers chunk c of every rank, padded to the largest (their
// sizes differ by at most one row):
//
//   tokens      | rank 0: c0 c1 | rank 1: c0 c1 |
//   collective 0  c0 of rank 0, c0 of rank 1
//   collective 1  c1 of rank 0, c1 of rank 1
//
// Where all ranks have equally many tokens, the rows of a chunk are one tensor
// [ranks, rows, width], in the collective's buffer as in a tensor of all
// tokens. One batched product takes them all: products of each rank's rows
// would be too small to fill a GPU.
#pragma once

#include <torch/types.h>

#include <string>
#include <vector>

#include "echelon/parallel/tensor/tensor_parallel.h"

namespace echelon::detail {

/// Some of all tokens: rows [begin, end) of each of `ranks` equal shards.
struct TokenRows {
  IndexRange range;
  int64_t ranks = 1;

  /// These rows of `all` [tokens, width], which a change changes too: [rows,
  /// width], or of several ranks [ranks, rows, width].
  torch::Tensor of(const torch::Tensor& all) const;
};

/// The rows of all tokens that are in a chunk of a rank.
class TokenChunks {
 public:
  /// Makes at most `chunks` chunks; none is empty on every rank.
  TokenChunks(int64_t tokens, const TensorParallel& parallel, int64_t chunks);

  int64_t tokens() const { return tokens_; }
  int64_t count() const { return chunks_; }
  int ranks() const { return ranks_; }
  IndexRange rows(int rank, int64_t chunk) const;
  /// The size of the largest rank's chunk.
  int64_t longest(int64_t chunk) const { return rows(0, chunk).size(); }
  /// Whether all ranks have equally many tokens: nothing is padded.
  bool even() const { return tokens_ % ranks_ == 0; }
  /// One chunk of equal size on every rank: the rows of all ranks are in order.
  bool plain() const { return chunks_ == 1 && even(); }
  /// A tensor of the rows of all chunks, chunk after chunk, each padded.
  torch::Tensor
  buffer(int64_t width, const torch::TensorOptions& options) const;
  /// The part of such a tensor that has a chunk.
  torch::Tensor part(const torch::Tensor& buffer, int64_t chunk) const;
  /// `all` [tokens, width] in the order of such a tensor: a copy, of even().
  torch::Tensor reordered(const torch::Tensor& all) const;

  /// Calls visit(rows, place) for the rows of a chunk: `rows`, a view of its
  /// part of a buffer, are those at `place` of all tokens.
  template <class Visit>
  void
  visit(const torch::Tensor& part, int64_t chunk, const Visit& visit) const {
    if (plain()) return visit(part, TokenRows{{0, tokens_}});
    if (even()) {
      return visit(
          part.unflatten(0, {ranks_, longest(chunk)}),
          TokenRows{rows(0, chunk), ranks_});
    }
    for (int rank = 0; rank < ranks_; ++rank) {
      const auto range = rows(rank, chunk);
      const int64_t begin = rank * longest(chunk);
      visit(part.slice(0, begin, begin + range.size()), TokenRows{range});
    }
  }

 private:
  int64_t tokens_;
  int ranks_;
  int64_t chunks_;
};

/// All-gathers rows. The constructor starts the collectives of all chunks.
class TokenGather {
 public:
  /// `mine` [tokens_r, width].
  TokenGather(
      const torch::Tensor& mine, const TokenChunks& chunks,
      const TensorParallel& parallel, const std::string& label);

  /// All rows in order, [tokens, width]: a copy unless chunks.plain().
  torch::Tensor all_tokens();
  /// All rows in the order of TokenChunks::reordered(), of chunks.even().
  torch::Tensor by_chunks();
  /// Calls visit(rows, place) as TokenChunks does for all rows, as chunks
  /// arrive.
  template <class Visit>
  void for_each(const Visit& visit) {
    for (int64_t c = 0; c < chunks_.count(); ++c) {
      works_[static_cast<size_t>(c)].wait();
      chunks_.visit(chunks_.part(buffer_, c), c, visit);
    }
  }

 private:
  TokenChunks chunks_;
  torch::Tensor buffer_;
  std::vector<Work> works_;
};

/// Sums rows over the ranks, and leaves each rank its own.
class TokenReduceScatter {
 public:
  TokenReduceScatter(
      int64_t width, const torch::TensorOptions& options,
      const TokenChunks& chunks, const TensorParallel& parallel,
      const std::string& label);

  /// Calls write(rows, place) as TokenChunks does for all rows; it fills them.
  /// Starts the collective of a chunk as soon as it is filled.
  template <class Write>
  void fill(const Write& write) {
    for (int64_t c = 0; c < chunks_.count(); ++c) {
      chunks_.visit(chunks_.part(buffer_, c), c, write);
      start(c);
    }
  }
  /// Waits for all chunks, and returns this rank's [tokens_r, width].
  torch::Tensor finish();

 private:
  void start(int64_t chunk);

  TokenChunks chunks_;
  TensorParallel parallel_;
  std::string label_;
  torch::Tensor output_;
  torch::Tensor buffer_;
  std::vector<torch::Tensor> results_;
  std::vector<Work> works_;
};

/// All-gathers the rows of `mine` [tokens_r, width] at once.
torch::Tensor gather_tokens(
    const torch::Tensor& mine, int64_t tokens, const TensorParallel& parallel,
    const std::string& label);

/// Reduce-scatters `all` [tokens, width] at once: this rank's rows of the sum.
torch::Tensor scatter_tokens(
    const torch::Tensor& all, const TensorParallel& parallel,
    const std::string& label);

}  // namespace echelon::detail
