#include "echelon/parallel/tensor/token_rows.h"

#include <torch/types.h>

#include <algorithm>

namespace echelon::detail {

using torch::Tensor;

TokenChunks::TokenChunks(
    int64_t tokens, const TensorParallel& parallel, int64_t chunks)
    : tokens_(tokens),
      ranks_(parallel.size()),
      chunks_(std::clamp<int64_t>(
          chunks, 1,
          std::max<int64_t>(1, even_range(tokens, 0, ranks_).size()))) {}

IndexRange TokenChunks::rows(int rank, int64_t chunk) const {
  const auto part = even_range(tokens_, rank, ranks_);
  const auto within = even_range(part.size(), chunk, chunks_);
  return {part.begin + within.begin, part.begin + within.end};
}

TokenGather::TokenGather(
    const Tensor& mine, const TokenChunks& chunks,
    const TensorParallel& parallel, const std::string& label)
    : chunks_(chunks) {
  const auto from = mine.contiguous();
  const int64_t width = from.size(1);
  const int64_t first = chunks.rows(parallel.rank(), 0).begin;
  for (int64_t c = 0; c < chunks.count(); ++c) {
    const auto rows = chunks.rows(parallel.rank(), c);
    const int64_t longest = chunks.longest(c);
    auto part = from.slice(0, rows.begin - first, rows.end - first);
    if (rows.size() < longest) {
      auto padded = torch::empty({longest, width}, from.options());
      padded.slice(0, 0, rows.size()).copy_(part);
      padded.slice(0, rows.size()).zero_();
      part = padded;
    }
    buffers_.push_back(
        torch::empty({longest * parallel.size(), width}, from.options()));
    works_.push_back(parallel.group.all_gather(
        buffers_.back(), part, {.label = label, .async = true}));
  }
}

Tensor TokenGather::rows(int rank, int64_t chunk) {
  const auto c = static_cast<size_t>(chunk);
  works_[c].wait();
  const int64_t begin = rank * chunks_.longest(chunk);
  return buffers_[c].slice(0, begin, begin + chunks_.rows(rank, chunk).size());
}

Tensor TokenGather::all_tokens() {
  if (chunks_.plain()) {
    works_[0].wait();
    return buffers_[0];
  }
  std::vector<Tensor> slices;
  for (int rank = 0; rank < chunks_.ranks(); ++rank) {
    for (int64_t c = 0; c < chunks_.count(); ++c) {
      slices.push_back(rows(rank, c));
    }
  }
  return torch::cat(slices);
}

TokenReduceScatter::TokenReduceScatter(
    int64_t width, const torch::TensorOptions& options,
    const TokenChunks& chunks, const TensorParallel& parallel,
    const std::string& label)
    : chunks_(chunks), parallel_(parallel), label_(label), width_(width) {
  output_ =
      torch::empty({parallel.part_of(chunks.tokens()).size(), width}, options);
  for (int64_t c = 0; c < chunks.count(); ++c) {
    buffers_.push_back(
        torch::empty({chunks.longest(c) * parallel.size(), width}, options));
  }
}

Tensor TokenReduceScatter::rows(int rank, int64_t chunk) {
  const int64_t begin = rank * chunks_.longest(chunk);
  return buffers_[static_cast<size_t>(chunk)].slice(
      0, begin, begin + chunks_.rows(rank, chunk).size());
}

void TokenReduceScatter::start(int64_t chunk) {
  const int64_t longest = chunks_.longest(chunk);
  const int64_t first = chunks_.rows(parallel_.rank(), 0).begin;
  const auto mine = chunks_.rows(parallel_.rank(), chunk);
  // The extra row of a padded chunk is summed too, and dropped by finish().
  results_.push_back(
      mine.size() == longest
          ? output_.slice(0, mine.begin - first, mine.end - first)
          : torch::empty({longest, width_}, output_.options()));
  auto& buffer = buffers_[static_cast<size_t>(chunk)];
  if (!chunks_.plain()) {
    for (int rank = 0; rank < chunks_.ranks(); ++rank) {
      const int64_t size = chunks_.rows(rank, chunk).size();
      buffer.slice(0, rank * longest + size, (rank + 1) * longest).zero_();
    }
  }
  works_.push_back(parallel_.group.reduce_scatter(
      results_.back(), buffer, ReduceOp::sum,
      {.label = label_, .async = true}));
}

Tensor TokenReduceScatter::finish() {
  const int64_t first = chunks_.rows(parallel_.rank(), 0).begin;
  for (size_t c = 0; c < works_.size(); ++c) {
    works_[c].wait();
    const auto mine = chunks_.rows(parallel_.rank(), static_cast<int64_t>(c));
    if (results_[c].size(0) == mine.size()) continue;
    output_.slice(0, mine.begin - first, mine.end - first)
        .copy_(results_[c].slice(0, 0, mine.size()));
  }
  return output_;
}

Tensor gather_tokens(
    const Tensor& mine, int64_t tokens, const TensorParallel& parallel,
    const std::string& label) {
  const TokenChunks chunks(tokens, parallel, 1);
  return TokenGather(mine, chunks, parallel, label).all_tokens();
}

Tensor scatter_tokens(
    const Tensor& all, const TensorParallel& parallel,
    const std::string& label) {
  const TokenChunks chunks(all.size(0), parallel, 1);
  if (chunks.plain()) {
    auto mine = torch::empty(
        {all.size(0) / parallel.size(), all.size(1)}, all.options());
    parallel.group.reduce_scatter(
        mine, all.contiguous(), ReduceOp::sum, {.label = label});
    return mine;
  }
  TokenReduceScatter scatter(
      all.size(1), all.options(), chunks, parallel, label);
  scatter.fill([&](const Tensor& rows, const IndexRange& range) {
    rows.copy_(all.slice(0, range.begin, range.end));
  });
  return scatter.finish();
}

}  // namespace echelon::detail
