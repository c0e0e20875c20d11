#include "echelon/parallel/context/context_parallel.h"

#include <torch/types.h>

#include "echelon/error.h"
#include "echelon/text/check.h"
#include "echelon/text/format.h"

namespace echelon {

std::vector<IndexRange>
SequenceCut::pieces_of(int64_t sequence, int64_t part) const {
  if (parts() == 1) return {{0, sequence}};
  const int64_t pieces = 2 * ranks;
  const int64_t first = part * neighbours;
  const auto together = [&](int64_t begin) {
    return IndexRange{
        even_range(sequence, begin, pieces).begin,
        even_range(sequence, begin + neighbours - 1, pieces).end};
  };
  return {together(first), together(pieces - first - neighbours)};
}

int64_t SequenceCut::length_of(int64_t sequence, int64_t part) const {
  int64_t length = 0;
  for (const auto& piece : pieces_of(sequence, part)) length += piece.size();
  return length;
}

std::vector<int64_t> SequenceCut::lengths_of(int64_t sequence) const {
  std::vector<int64_t> lengths;
  for (int64_t part = 0; part < parts(); ++part) {
    lengths.push_back(length_of(sequence, part));
  }
  return lengths;
}

ContextParallel::ContextParallel(
    const Group& all, const ContextParallelOptions& options)
    : ContextParallel(
          all, options,
          head_ranks(options, all.size()) == 1 ? Group::alone("cp") : all,
          head_ranks(options, all.size()) == 1 ? all : Group::alone("cp")) {}

ContextParallel::ContextParallel(
    const Group& all, const ContextParallelOptions& options, const Group& heads,
    const Group& keys)
    : group(all), options(options), heads(heads), keys(keys) {
  ECHELON_CHECK(
      heads.size() * keys.size() == all.size() &&
          heads.size() == head_ranks(options, all.size()),
      "cp={} with groups of {} and {}, way {}", all.size(), heads.size(),
      keys.size(), to_string(options.way));
}

ContextParallel ContextParallel::silent(
    int rank, int size, const ContextParallelOptions& options) {
  const auto together = static_cast<int>(head_ranks(options, size));
  return {
      Group::silent("cp", rank, size), options,
      Group::silent("cp", rank % together, together),
      Group::silent("cp", rank / together, size / together)};
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
