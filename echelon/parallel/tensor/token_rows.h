// Rows of tokens that are cut over a tensor-parallel group, gathered and summed
// piece by piece. For the .cpp files of this folder; no autograd here.
//
// Rank r has part r of the tokens; each part is cut into `chunks` chunks. What
// travels in chunk c is chunk c of every rank, in one collective, padded to the
// largest (they differ by a row at most):
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

/// Which rows of all tokens are in a chunk of a rank.
class TokenChunks {
 public:
  /// `chunks`: as many at most; none is empty on every rank.
  TokenChunks(int64_t tokens, const TensorParallel& parallel, int64_t chunks);

  int64_t tokens() const { return tokens_; }
  int64_t count() const { return chunks_; }
  int ranks() const { return ranks_; }
  IndexRange rows(int rank, int64_t chunk) const;
  /// The largest of the ranks' chunks.
  int64_t longest(int64_t chunk) const { return rows(0, chunk).size(); }
  /// Every rank has as much, in one chunk: padding and order are those of the
  /// whole.
  bool plain() const { return chunks_ == 1 && tokens_ % ranks_ == 0; }

 private:
  int64_t tokens_;
  int ranks_;
  int64_t chunks_;
};

/// Gathers rows. All chunks are on their way when the constructor returns.
class TokenGather {
 public:
  /// `mine` [tokens_r, width].
  TokenGather(
      const torch::Tensor& mine, const TokenChunks& chunks,
      const TensorParallel& parallel, const std::string& label);

  /// The rows of chunk c of a rank; waits for chunk c.
  torch::Tensor rows(int rank, int64_t chunk);
  /// All of them, [tokens, width], in order: a copy unless chunks.plain().
  torch::Tensor whole();

 private:
  TokenChunks chunks_;
  std::vector<torch::Tensor> buffers_;
  std::vector<Work> works_;
};

/// Sums rows and leaves each rank its own. The caller fills rows(rank, c) of
/// all ranks, then calls start(c), for each chunk in order.
class TokenReduceScatter {
 public:
  TokenReduceScatter(
      int64_t width, const torch::TensorOptions& options,
      const TokenChunks& chunks, const TensorParallel& parallel,
      const std::string& label);

  /// Where to write; uninitialised.
  torch::Tensor rows(int rank, int64_t chunk);
  /// The rows of all ranks, where the chunks are plain().
  torch::Tensor all() const { return buffers_[0]; }
  void start(int64_t chunk);
  /// This rank's [tokens_r, width]; waits for all chunks.
  torch::Tensor finish();

 private:
  TokenChunks chunks_;
  TensorParallel parallel_;
  std::string label_;
  int64_t width_;
  torch::Tensor output_;
  std::vector<torch::Tensor> buffers_;
  std::vector<torch::Tensor> results_;
  std::vector<Work> works_;
};

/// The same at once: all rows of `mine` [tokens_r, width].
torch::Tensor gather_tokens(
    const torch::Tensor& mine, int64_t tokens, const TensorParallel& parallel,
    const std::string& label);

/// And this rank's rows of the sum of `all` [tokens, width].
torch::Tensor scatter_tokens(
    const torch::Tensor& all, const TensorParallel& parallel,
    const std::string& label);

}  // namespace echelon::detail
