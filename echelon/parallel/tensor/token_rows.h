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
#pragma once

#include <torch/types.h>

#include <string>
#include <vector>

#include "echelon/parallel/tensor/tensor_parallel.h"

namespace echelon::detail {

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
  /// One chunk of equal size on every rank: nothing is padded, and the rows of
  /// all ranks are in order.
  bool plain() const { return chunks_ == 1 && tokens_ % ranks_ == 0; }

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

  /// Waits for a chunk, and returns a rank's rows of it.
  torch::Tensor rows(int rank, int64_t chunk);
  /// All rows in order, [tokens, width]: a copy unless chunks.plain().
  torch::Tensor all_tokens();
  /// Calls visit(rows, range) for all rows, range by range, as chunks arrive.
  template <class Visit>
  void for_each(const Visit& visit) {
    if (chunks_.plain())
      return visit(all_tokens(), IndexRange{0, chunks_.tokens()});
    for (int64_t c = 0; c < chunks_.count(); ++c) {
      for (int rank = 0; rank < chunks_.ranks(); ++rank) {
        visit(rows(rank, c), chunks_.rows(rank, c));
      }
    }
  }

 private:
  TokenChunks chunks_;
  std::vector<torch::Tensor> buffers_;
  std::vector<Work> works_;
};

/// Sums rows over the ranks, and leaves each rank its own.
class TokenReduceScatter {
 public:
  TokenReduceScatter(
      int64_t width, const torch::TensorOptions& options,
      const TokenChunks& chunks, const TensorParallel& parallel,
      const std::string& label);

  /// Calls write(rows, range), which fills the uninitialised rows, for all
  /// rows, range by range. Starts the collective of a chunk as soon as it is
  /// filled.
  template <class Write>
  void fill(const Write& write) {
    for (int64_t c = 0; c < chunks_.count(); ++c) {
      if (chunks_.plain()) {
        write(buffers_[0], IndexRange{0, chunks_.tokens()});
      } else {
        for (int rank = 0; rank < chunks_.ranks(); ++rank) {
          write(rows(rank, c), chunks_.rows(rank, c));
        }
      }
      start(c);
    }
  }
  /// Waits for all chunks, and returns this rank's [tokens_r, width].
  torch::Tensor finish();

 private:
  torch::Tensor rows(int rank, int64_t chunk);
  void start(int64_t chunk);

  TokenChunks chunks_;
  TensorParallel parallel_;
  std::string label_;
  int64_t width_;
  torch::Tensor output_;
  std::vector<torch::Tensor> buffers_;
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
