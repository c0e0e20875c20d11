#include "echelon/parallel/context/context_parallel.h"

#include <torch/types.h>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {

std::vector<IndexRange>
ContextParallel::pieces_of(int64_t sequence, int rank) const {
  if (!is_used()) return {{0, sequence}};
  const int64_t pieces = 2 * int64_t{size()};
  return {
      even_range(sequence, rank, pieces),
      even_range(sequence, pieces - 1 - rank, pieces)};
}

int64_t ContextParallel::length_of(int64_t sequence, int rank) const {
  int64_t length = 0;
  for (const auto& piece : pieces_of(sequence, rank)) length += piece.size();
  return length;
}

std::vector<int64_t> ContextParallel::lengths_of(int64_t sequence) const {
  std::vector<int64_t> lengths;
  for (int rank = 0; rank < size(); ++rank) {
    lengths.push_back(length_of(sequence, rank));
  }
  return lengths;
}

torch::Tensor ContextParallel::cut(const torch::Tensor& x, int64_t dim) const {
  if (!is_used()) return x;
  const int64_t sequence = x.size(dim);
  if (sequence < size()) {
    throw ConfigError(format(
        "[layout] cp={}, but a sequence has {} tokens: each rank needs one; "
        "lower cp or set a longer data.sequence",
        size(), sequence));
  }
  return rows_at(x, dim, pieces_of(sequence));
}

torch::Tensor rows_at(
    const torch::Tensor& x, int64_t dim,
    const std::vector<IndexRange>& pieces) {
  if (pieces.size() == 1) {
    return x.narrow(dim, pieces[0].begin, pieces[0].size());
  }
  std::vector<torch::Tensor> rows;
  for (const auto& piece : pieces) {
    rows.push_back(x.narrow(dim, piece.begin, piece.size()));
  }
  return at::cat(rows, dim);
}

}  // namespace echelon
