#include "echelon/parallel/context/block_attention.h"

#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include "echelon/layers/computing_device.h"
#include "echelon/layers/low_precision.h"

namespace echelon::detail {
namespace {

using torch::Tensor;

// Scores are made for as many rows at a time as give this many of them.
constexpr int64_t kScores = int64_t{1} << 22;

// The log-sum-exp of CUDA's efficient kernel has a multiple of so many rows.
constexpr int64_t kAlignedRows = 32;

// Below every score, and finite in float32.
constexpr double kLeastScore = -1e30;

Tensor rows_of(const Tensor& x, const IndexRange& rows) {
  return rows.size() == x.size(2) ? x : x.narrow(2, rows.begin, rows.size());
}

IndexRange moved(const IndexRange& range, int64_t by) {
  return {range.begin + by, range.end + by};
}

// Calls work(range) for chunks of [0, rows).
template <class Work>
void in_chunks(int64_t rows, int64_t scores_of_row, const Work& work) {
  const int64_t step =
      std::max<int64_t>(1, kScores / std::max<int64_t>(1, scores_of_row));
  for (int64_t begin = 0; begin < rows; begin += step) {
    work(IndexRange{begin, std::min(rows, begin + step)});
  }
}

// A tensor [batch, heads, rows] in the order that the fused kernel makes.
Tensor rows_before_heads(const Tensor& lse) {
  return lse.transpose(1, 2).contiguous().transpose(1, 2);
}

}  // namespace

BlockAttention::BlockAttention(
    const ContextAttentionCall& call, int64_t kv_heads, const Tensor& like)
    : call_(call),
      kv_heads_(kv_heads),
      sums_(sum_dtype(like.scalar_type())),
      kernel_(kernel_for(call, like)) {
  const auto heads = static_cast<int64_t>(call.kv_of_query.size());
  group_ = heads % kv_heads == 0 ? heads / kv_heads : 0;
  for (int64_t head = 0; head < heads && group_ > 0; ++head) {
    const bool even =
        call.kv_of_query[static_cast<size_t>(head)] == head / group_;
    if (!even) group_ = 0;
  }
  if (group_ == 0) {
    // Each number is a kernel's argument: a copy from the host would wait.
    indices_ = torch::empty(
        {heads}, torch::dtype(torch::kInt64).device(like.device()));
    for (int64_t head = 0; head < heads; ++head) {
      indices_[head].fill_(call.kv_of_query[static_cast<size_t>(head)]);
    }
  }
}

BlockAttention::Kernel BlockAttention::kernel_for(
    const ContextAttentionCall& call, const Tensor& like) {
  const bool masked = call.documents.defined() || call.is_windowed();
  if (masked || call.dropout > 0 || call.softcap > 0) return Kernel::none;
  if (like.is_cpu() || like.is_meta()) return Kernel::cpu;
  if (!like.is_cuda()) return Kernel::none;
  // What the kernels take: rows of whole 16 bytes, and at most 256 elements of
  // a head. A GPU that trains in bfloat16 is new enough for `flash`.
  const int64_t size = like.size(-1);
  const auto dtype = like.scalar_type();
  if (dtype == torch::kBFloat16 && size % 8 == 0 && size <= 256) {
    return Kernel::flash;
  }
  const bool takes = (dtype == torch::kHalf && size % 8 == 0) ||
                     (dtype == torch::kFloat32 && size % 4 == 0);
  return takes && size <= 256 ? Kernel::efficient : Kernel::none;
}

std::vector<ScoreBlock> BlockAttention::blocks_of(
    const std::vector<IndexRange>& queries,
    const std::vector<IndexRange>& keys) const {
  auto blocks = score_blocks(queries, keys, fused());
  if (call_.is_windowed()) blocks = within_window(blocks, call_.window);
  std::erase_if(blocks, [&](const auto& one) { return !sees_any(one); });
  return blocks;
}

// False when no sample has a document on both sides. Documents that are not on
// the CPU are not read.
bool BlockAttention::sees_any(const ScoreBlock& block) const {
  const auto& documents = call_.documents;
  if (!documents.defined() || !documents.is_cpu() || block.causal) return true;
  const auto side = [&](const IndexRange& range) {
    return documents.narrow(1, range.begin, range.size()).aminmax(1);
  };
  const auto [first_q, last_q] = side(block.queries);
  const auto [first_k, last_k] = side(block.keys);
  return first_q.le(last_k).logical_and_(first_k.le(last_q)).any().item<bool>();
}

double BlockAttention::scale_of(const Tensor& query) const {
  if (call_.scale != 0) return call_.scale;
  return 1 / std::sqrt(static_cast<double>(query.size(-1)));
}

// kv [batch, kv_heads, tokens, size] with a head for each of the queries'.
Tensor BlockAttention::for_queries(const Tensor& kv) const {
  if (group_ == 1) return kv;
  if (group_ == 0) return kv.index_select(1, indices_);
  return kv.unsqueeze(2).expand({-1, -1, group_, -1, -1}).flatten(1, 2);
}

// The adjoint of for_queries, in the dtype of sums.
Tensor BlockAttention::for_keys(const Tensor& gradient) const {
  const auto wide = gradient.to(sums_);
  if (group_ == 1) return wide;
  auto sizes = wide.sizes().vec();
  if (group_ == 0) {
    sizes[1] = kv_heads_;
    return at::zeros(sizes, wide.options()).index_add_(1, indices_, wide);
  }
  return wide.unflatten(1, {kv_heads_, group_}).sum(2);
}

// The scores of some of the block's rows, in the dtype of sums, with minus
// infinity where a query does not see a key.
Tensor BlockAttention::scores(
    const Tensor& query, const Tensor& key, const ScoreBlock& block,
    const IndexRange& rows) const {
  auto scores =
      at::matmul(query * scale_of(query), key.transpose(2, 3)).to(sums_);
  if (call_.softcap > 0) {
    scores.div_(call_.softcap).tanh_().mul_(call_.softcap);
  }
  const double hidden = -std::numeric_limits<double>::infinity();
  const auto& documents = call_.documents;
  if (documents.defined()) {
    const auto own = moved(rows, block.queries.begin);
    const auto mine = documents.narrow(1, own.begin, own.size());
    const auto others =
        documents.narrow(1, block.keys.begin, block.keys.size());
    scores.masked_fill_(
        mine.unsqueeze(2).ne(others.unsqueeze(1)).unsqueeze(1), hidden);
  }
  // How far the first row's position is behind that of the first column.
  const int64_t ahead = rows.begin + block.queries.begin - block.keys.begin;
  const auto all = [&] {
    return at::ones(
        {rows.size(), block.columns.size()},
        scores.options().dtype(torch::kBool));
  };
  if (block.causal) scores.masked_fill_(all().triu(ahead + 1), hidden);
  if (call_.is_windowed()) {
    scores.masked_fill_(all().tril(ahead - call_.window), hidden);
  }
  return scores;
}

// Undefined: all.
Tensor BlockAttention::kept(
    const Tensor& probabilities, const ScoreBlock& block,
    const IndexRange& rows) const {
  if (call_.dropout == 0) return {};
  return call_.kept(
      probabilities, 0, moved(rows, block.queries.begin), block.keys);
}

BlockAttention::Result BlockAttention::fused_forward(
    const Tensor& query, const Tensor& key, const Tensor& value,
    bool causal) const {
  constexpr double kNoDropout = 0;
  const double scale = scale_of(query);
  Tensor out, lse;
  if (kernel_ == Kernel::cpu) {
    std::tie(out, lse) = at::_scaled_dot_product_flash_attention_for_cpu(
        query, key, value, kNoDropout, causal, /*attn_mask=*/std::nullopt,
        scale);
  } else if (kernel_ == Kernel::flash) {
    const auto results = at::_scaled_dot_product_flash_attention(
        query, key, value, kNoDropout, causal, /*return_debug_mask=*/false,
        scale);
    out = std::get<0>(results);
    lse = std::get<1>(results);
  } else {
    const auto results = at::_scaled_dot_product_efficient_attention(
        query, key, value, /*attn_bias=*/std::nullopt,
        /*compute_log_sumexp=*/true, kNoDropout, causal, scale);
    out = std::get<0>(results);
    // It has rows up to a multiple of kAlignedRows.
    lse = std::get<1>(results).narrow(2, 0, query.size(2));
  }
  return {out.to(sums_), lse};
}

BlockAttention::Gradients BlockAttention::fused_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& out, const Tensor& lse,
    bool causal) const {
  constexpr double kNoDropout = 0;
  const double scale = scale_of(query);
  if (kernel_ == Kernel::cpu) {
    auto [for_q, for_k, for_v] =
        at::_scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, rows_before_heads(lse),
            kNoDropout, causal, /*attn_mask=*/std::nullopt, scale);
    return {for_q, for_k, for_v};
  }
  // The state of the random numbers that nothing draws.
  const Tensor unused = at::empty({}, query.options().dtype(torch::kInt64));
  if (kernel_ == Kernel::flash) {
    auto [for_q, for_k, for_v] =
        at::_scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, out, lse.contiguous(),
            /*cum_seq_q=*/{}, /*cum_seq_k=*/{}, query.size(2), key.size(2),
            kNoDropout, causal, at::empty({2}, unused.options()), unused,
            scale);
    return {for_q, for_k, for_v};
  }
  const int64_t missing =
      (kAlignedRows - query.size(2) % kAlignedRows) % kAlignedRows;
  auto [for_q, for_k, for_v, for_bias] =
      at::_scaled_dot_product_efficient_attention_backward(
          gradient, query, key, value, /*attn_bias=*/{}, out,
          at::constant_pad_nd(
              lse, {0, missing}, std::numeric_limits<double>::infinity())
              .contiguous(),
          unused, unused, kNoDropout, {true, true, true, false}, causal, scale);
  return {for_q, for_k, for_v};
}

BlockAttention::Result BlockAttention::forward(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const ScoreBlock& block) const {
  const auto q = rows_of(query, block.rows);
  const auto k = for_queries(rows_of(key, block.columns));
  const auto v = for_queries(rows_of(value, block.columns));
  if (fused()) return fused_forward(q, k, v, block.causal);
  const auto wide = q.options().dtype(sums_);
  Result result{
      at::empty(q.sizes(), wide), at::empty(q.sizes().slice(0, 3), wide)};
  in_chunks(q.size(2), q.size(0) * q.size(1) * k.size(2), [&](auto rows) {
    auto p = scores(rows_of(q, rows), k, block, rows);
    // A row that sees no key has no largest score, and a sum of 0.
    const auto largest = p.amax(-1, /*keepdim=*/true).clamp_min_(kLeastScore);
    p.sub_(largest).exp_();
    const auto sum = p.sum(-1, /*keepdim=*/true);
    result.lse.narrow(2, rows.begin, rows.size())
        .copy_((sum.log() + largest).squeeze(-1));
    if (const auto keep = kept(p, block, rows); keep.defined()) {
      p.mul_(keep).div_(1 - call_.dropout);
    }
    p.div_(sum.clamp_min(1));  // any other sum is at least 1
    rows_of(result.out, rows).copy_(at::matmul(p.to(v.scalar_type()), v));
  });
  return result;
}

BlockAttention::Gradients BlockAttention::backward(
    const Saved& saved, const Tensor& key, const Tensor& value,
    const ScoreBlock& block) const {
  const auto q = rows_of(saved.query, block.rows);
  const auto gradient = rows_of(saved.gradient, block.rows);
  const auto lse = saved.lse.narrow(2, block.rows.begin, block.rows.size());
  const auto k = for_queries(rows_of(key, block.columns));
  const auto v = for_queries(rows_of(value, block.columns));
  if (fused()) {
    const auto part = fused_backward(
        gradient, q, k, v, rows_of(saved.out, block.rows), lse, block.causal);
    return {part.query.to(sums_), for_keys(part.key), for_keys(part.value)};
  }
  const auto delta = saved.delta.narrow(2, block.rows.begin, block.rows.size());
  const auto wide = q.options().dtype(sums_);
  Tensor for_q = at::empty(q.sizes(), wide);
  Tensor for_k = at::zeros(k.sizes(), wide);
  Tensor for_v = at::zeros(v.sizes(), wide);
  const auto dtype = q.scalar_type();
  in_chunks(q.size(2), q.size(0) * q.size(1) * k.size(2), [&](auto rows) {
    const auto own = rows_of(q, rows);
    const auto up = rows_of(gradient, rows);
    const auto chunk = [&](const Tensor& numbers) {
      return numbers.narrow(2, rows.begin, rows.size()).unsqueeze(-1);
    };
    auto p = scores(own, k, block, rows);
    Tensor slope;  // of the cap; hidden scores have the probability 0
    if (call_.softcap > 0) {
      slope = p.div(call_.softcap).clamp_min_(-1).square_().neg_().add_(1);
    }
    p.sub_(chunk(lse)).exp_();
    auto for_p = at::matmul(up, v.transpose(2, 3)).to(sums_);
    auto shares = p;
    if (const auto keep = kept(p, block, rows); keep.defined()) {
      const double factor = 1 / (1 - call_.dropout);
      shares = p.mul(keep).mul_(factor);
      for_p.mul_(keep).mul_(factor);
    }
    for_v.add_(at::matmul(shares.to(dtype).transpose(2, 3), up));
    for_p.sub_(chunk(delta)).mul_(p).mul_(scale_of(q));
    if (slope.defined()) for_p.mul_(slope);
    const auto for_scores = for_p.to(dtype);
    rows_of(for_q, rows).copy_(at::matmul(for_scores, k));
    for_k.add_(at::matmul(for_scores.transpose(2, 3), own));
  });
  return {for_q, for_keys(for_k), for_keys(for_v)};
}

void MergedAttention::add(
    const IndexRange& rows, BlockAttention::Result result) {
  if (!out_.defined() && rows.size() == rows_) {
    out_ = std::move(result.out);
    lse_ = std::move(result.lse);
    return;
  }
  if (!out_.defined()) {
    auto sizes = result.out.sizes().vec();
    sizes[2] = rows_;
    out_ = at::zeros(sizes, result.out.options());
    sizes.pop_back();
    lse_ = at::full(
        sizes, -std::numeric_limits<double>::infinity(), result.lse.options());
  }
  auto out = rows_of(out_, rows);
  auto lse = lse_.narrow(2, rows.begin, rows.size());
  out.lerp_(result.out, at::sigmoid(result.lse - lse).unsqueeze(-1));
  lse.copy_(at::logaddexp(lse, result.lse));
}

std::vector<ScoreBlock>
within_window(const std::vector<ScoreBlock>& blocks, int64_t window) {
  std::vector<ScoreBlock> left;
  for (const auto& whole : blocks) {
    for (int64_t row = 0; row < whole.rows.size(); row += window) {
      const IndexRange rows{row, std::min(whole.rows.size(), row + window)};
      const auto queries = moved(rows, whole.queries.begin);
      const IndexRange keys{
          std::max(whole.keys.begin, queries.begin - window + 1),
          std::min(whole.keys.end, queries.end)};
      if (keys.begin >= keys.end) continue;
      left.push_back(
          {.rows = moved(rows, whole.rows.begin),
           .columns = moved(keys, whole.columns.begin - whole.keys.begin),
           .queries = queries,
           .keys = keys,
           .causal = whole.causal});
    }
  }
  return left;
}

std::vector<ScoreBlock> score_blocks(
    const std::vector<IndexRange>& queries, const std::vector<IndexRange>& keys,
    bool merged) {
  const auto total = [](const std::vector<IndexRange>& pieces) {
    int64_t sum = 0;
    for (const auto& piece : pieces) sum += piece.size();
    return sum;
  };
  std::vector<ScoreBlock> blocks;
  if (merged && queries == keys) {
    const IndexRange all{0, total(queries)};
    blocks.push_back({.rows = all, .columns = all, .causal = true});
    return blocks;
  }
  int64_t row = 0;
  for (const auto& query : queries) {
    const IndexRange rows{row, row + query.size()};
    row = rows.end;
    if (query.size() == 0) continue;
    int64_t column = 0;
    int64_t seen = 0;  // columns before the query's piece
    for (const auto& key : keys) {
      const IndexRange columns{column, column + key.size()};
      column = columns.end;
      if (key.size() == 0 || key.begin > query.begin) continue;
      if (merged) {
        seen = columns.end;
        continue;
      }
      ScoreBlock block{rows, columns, query, key, key == query};
      // A query sees itself: its own piece comes first, so that the sum of
      // exponentials is never empty.
      if (block.causal) {
        blocks.insert(blocks.begin(), block);
      } else {
        blocks.push_back(block);
      }
    }
    if (!merged || seen == 0) continue;
    if (!blocks.empty() && blocks.back().rows.end == rows.begin &&
        blocks.back().columns.end == seen) {
      blocks.back().rows.end = rows.end;
    } else {
      blocks.push_back({.rows = rows, .columns = {0, seen}});
    }
  }
  return blocks;
}

}  // namespace echelon::detail
