#include "echelon/parallel/tensor/token_rows.h"

#include <torch/types.h>

#include <algorithm>

namespace echelon::detail {

using torch::Tensor;

Tensor TokenRows::of(const Tensor& all) const {
  if (ranks == 1) return all.slice(0, range.begin, range.end);
  return all.unflatten(0, {ranks, all.size(0) / ranks})
      .slice(1, range.begin, range.end);
}

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

Tensor
TokenChunks::buffer(int64_t width, const torch::TensorOptions& options) const {
  int64_t padded = 0;
  for (int64_t c = 0; c < chunks_; ++c) padded += longest(c);
  return torch::empty({padded * ranks_, width}, options);
}

Tensor TokenChunks::part(const Tensor& buffer, int64_t chunk) const {
  int64_t begin = 0;
  for (int64_t c = 0; c < chunk; ++c) begin += longest(c);
  return buffer.slice(0, begin * ranks_, (begin + longest(chunk)) * ranks_);
}

Tensor TokenChunks::reordered(const Tensor& all) const {
  if (plain()) return all;
  auto copy = buffer(all.size(1), all.options());
  for (int64_t c = 0; c < chunks_; ++c) {
    visit(part(copy, c), c, [&](const Tensor& rows, const TokenRows& place) {
      rows.copy_(place.of(all));
    });
  }
  return copy;
}

TokenGather::TokenGather(
    const Tensor& mine, const TokenChunks& chunks,
    const TensorParallel& parallel, const std::string& label)
    : chunks_(chunks), buffer_(chunks.buffer(mine.size(1), mine.options())) {
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
    works_.push_back(parallel.group.all_gather(
        chunks.part(buffer_, c), part, {.label = label, .async = true}));
  }
}

Tensor TokenGather::by_chunks() {
  for (const auto& work : works_) work.wait();
  return buffer_;
}

Tensor TokenGather::all_tokens() {
  if (chunks_.plain()) return by_chunks();
  auto all =
      torch::empty({chunks_.tokens(), buffer_.size(1)}, buffer_.options());
  for_each([&](const Tensor& rows, const TokenRows& place) {
    place.of(all).copy_(rows);
  });
  return all;
}

TokenReduceScatter::TokenReduceScatter(
    int64_t width, const torch::TensorOptions& options,
    const TokenChunks& chunks, const TensorParallel& parallel,
    const std::string& label)
    : chunks_(chunks),
      parallel_(parallel),
      label_(label),
      output_(torch::empty(
          {parallel.part_of(chunks.tokens()).size(), width}, options)),
      buffer_(chunks.buffer(width, options)) {}

void TokenReduceScatter::start(int64_t chunk) {
  const int64_t longest = chunks_.longest(chunk);
  const int64_t first = chunks_.rows(parallel_.rank(), 0).begin;
  const auto mine = chunks_.rows(parallel_.rank(), chunk);
  // The extra row of a padded chunk is summed too, and dropped by finish().
  results_.push_back(
      mine.size() == longest
          ? output_.slice(0, mine.begin - first, mine.end - first)
          : torch::empty({longest, output_.size(1)}, output_.options()));
  const auto part = chunks_.part(buffer_, chunk);
  if (!chunks_.even()) {
    for (int rank = 0; rank < chunks_.ranks(); ++rank) {
      const int64_t size = chunks_.rows(rank, chunk).size();
      part.slice(0, rank * longest + size, (rank + 1) * longest).zero_();
    }
  }
  works_.push_back(parallel_.group.reduce_scatter(
      results_.back(), part, ReduceOp::sum, {.label = label_, .async = true}));
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
  scatter.fill([&](const Tensor& rows, const TokenRows& place) {
    rows.copy_(place.of(all));
  });
  return scatter.finish();
}

}  // namespace echelon::detail
