// The heads of queries are divided evenly; a rank has the key/value heads that
// its queries use. A key/value head that several ranks have is owned by the
// first, for checkpoints and norms. They are repeated, one for each query head,
// where a kernel does not group queries by itself or where they serve different
// numbers of queries.
#include "echelon/parallel/tensor/attention.h"

#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "echelon/comm/differentiable.h"
#include "echelon/error.h"
#include "echelon/layers/computing_device.h"
#include "echelon/parallel/context/attention.h"
#include "echelon/parallel/tensor/dropout.h"
#include "echelon/text/check.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using torch::Tensor;

IndexRange times(const IndexRange& range, int64_t factor, int64_t offset) {
  return {offset + range.begin * factor, offset + range.end * factor};
}

std::string text(at::IntArrayRef sizes) {
  return "[" + join(sizes, ", ") + "]";
}

// Positions [past, past + sequence) attend to all positions up to themselves.
Tensor
causal_mask(int64_t sequence, int64_t past, const torch::TensorOptions& like) {
  return torch::full(
             {sequence, past + sequence},
             -std::numeric_limits<double>::infinity(), like)
      .triu(past + 1);
}

// Adds minus infinity to the scores of positions that a window of `window`
// tokens does not reach. `mask` undefined: positions attend up to themselves.
Tensor in_window(
    const Tensor& mask, int64_t window, int64_t sequence, int64_t past,
    const torch::TensorOptions& like) {
  const torch::NoGradGuard no_grad;
  const auto outside = torch::full(
                           {sequence, past + sequence},
                           -std::numeric_limits<double>::infinity(), like)
                           .tril(past - window);
  return outside + (mask.defined() ? mask : causal_mask(sequence, past, like));
}

// A larger buffer for `length` positions, with a copy of the old contents.
Tensor grown(const Tensor& old, const Tensor& like, int64_t length) {
  auto sizes = like.sizes().vec();
  sizes[1] = length;
  auto room = at::empty(sizes, like.options());
  if (old.defined()) room.narrow(1, 0, old.size(1)).copy_(old);
  return room;
}

// Appends `added` [batch, n, heads, size]; returns all positions so far.
Tensor append(Tensor& room, const Tensor& added, int64_t length) {
  const int64_t end = length + added.size(1);
  if (!room.defined() || room.size(1) < end) {
    room = grown(room, added, std::max(end, 2 * length));
  }
  room.narrow(1, length, added.size(1)).copy_(added);
  return room.narrow(1, 0, end);
}

// The number of this rank's query heads that use each of its key/value heads.
std::vector<int64_t> queries_of_kv(const AttentionHeads& heads, int64_t group) {
  std::vector<int64_t> counts;
  for (int64_t kv = heads.kv.begin; kv < heads.kv.end; ++kv) {
    const int64_t begin = std::max(heads.query.begin, kv * group);
    counts.push_back(std::min(heads.query.end, (kv + 1) * group) - begin);
  }
  return counts;
}

void check_input(
    const Tensor& x, const AttentionFrame& frame,
    const TensorParallel& parallel, int64_t hidden, const std::string& label) {
  const std::vector<int64_t> expected =
      parallel.splits_tokens()
          ? std::vector<
                int64_t>{parallel.part_of(frame.batch * frame.sequence).size(), hidden}
          : std::vector<int64_t>{frame.batch, frame.sequence, hidden};
  if (x.sizes() == at::IntArrayRef(expected)) return;
  throw ConfigError(format(
      "{}: the input is {}, but attention over {} x {} tokens takes {} here",
      label, text(x.sizes()), frame.batch, frame.sequence, text(expected)));
}

// "1, 2, 5 or 10": the divisors of `number`.
std::string divisors(int64_t number) {
  std::string text;
  for (int64_t d = 1; d <= number; ++d) {
    if (number % d != 0) continue;
    if (!text.empty()) text += d == number ? " or " : ", ";
    text += std::to_string(d);
  }
  return text;
}

// The divisors of `number` nearest to `wanted`: "8 or 16".
std::string divisors_near(int64_t number, int64_t wanted) {
  int64_t below = std::min(wanted, number);
  while (number % below != 0) --below;
  int64_t above = std::min(wanted, number);
  while (number % above != 0) ++above;
  const auto text = std::to_string(below);
  return below == above ? text : text + " or " + std::to_string(above);
}

void check_positive(const char* name, int64_t value) {
  if (value > 0) return;
  throw ConfigError(
      format("[model] {}={}, but attention needs at least 1", name, value));
}

// Whether attention's kernel takes fewer heads of keys than of queries. CUDA's
// flash attention does, in 16 bits and without a mask; for other dtypes the one
// that does stores the scores, and the one that does not is better.
bool groups_heads(const Tensor& key, bool masked) {
  const auto dtype = key.scalar_type();
  return computing_device(key) == torch::kCUDA && !masked &&
         (dtype == torch::kBFloat16 || dtype == torch::kHalf);
}

// Values [..., size] with zeros behind each, up to `size` features. The CPU's
// fused kernel and those of cut sequences take values as wide as keys.
Tensor widened(const Tensor& values, int64_t size) {
  const int64_t more = size - values.size(-1);
  return more > 0 ? at::constant_pad_nd(values, {0, more}) : values;
}

// The reverse for results. A view of all of them would not do: its backward
// fills zeros and copies.
Tensor narrowed(const Tensor& results, int64_t size) {
  return results.size(-1) > size ? results.narrow(-1, 0, size) : results;
}

}  // namespace

// A matrix that every rank has. With sharded tokens each rank's gradient is a
// term of the sum.
class CompressingLinear : public ShardedModule {
 public:
  CompressingLinear(int64_t in, int64_t out, const TensorParallel& parallel)
      : weight(register_shard(
            "weight",
            {replicated({out, in}, parallel.rank()), parallel.splits_tokens(),
             InitialValue::normal_of(0.02)})) {}

  Tensor forward(const Tensor& x) { return at::linear(x, weight); }

  Tensor weight;
};

void check_attention(const AttentionShape& shape, int64_t tp) {
  check_positive("hidden_size", shape.hidden);
  check_positive("heads", shape.heads);
  if (shape.head_size <= 0 && shape.hidden % shape.heads != 0) {
    throw ConfigError(format(
        "[model] hidden_size={} is not a multiple of heads={}: heads share the "
        "features evenly; heads={} would fit",
        shape.hidden, shape.heads, divisors_near(shape.hidden, shape.heads)));
  }
  if (shape.heads % shape.num_kv_heads() != 0) {
    throw ConfigError(format(
        "[model] heads={} is not a multiple of kv_heads={}: each head of keys "
        "and values serves as many heads of queries; kv_heads may be {}",
        shape.heads, shape.num_kv_heads(), divisors(shape.heads)));
  }
  if (tp > shape.heads) {
    throw ConfigError(format(
        "[layout] tp={}, but the model has heads={}: each tensor-parallel rank "
        "needs a head of attention; tp of 1 to {} fits, and {} gives each rank "
        "as many",
        tp, shape.heads, shape.heads, divisors(shape.heads)));
  }
}

AttentionHeads heads_of(const AttentionShape& shape, int64_t rank, int64_t tp) {
  const int64_t group = shape.group();
  // The number of key/value heads that query heads [0, end) use.
  const auto kv_end = [group](int64_t end) {
    return (end + group - 1) / group;
  };
  AttentionHeads heads;
  heads.query = even_range(shape.heads, rank, tp);
  heads.kv = {heads.query.begin / group, kv_end(heads.query.end)};
  heads.kv_owned = {
      std::max(heads.kv.begin, kv_end(heads.query.begin)), heads.kv.end};
  for (int64_t other = 1; other < tp; ++other) {
    heads.shares_kv |= even_range(shape.heads, other, tp).begin % group != 0;
  }
  heads.uniform = heads.kv.size() == 1 || (heads.query.begin % group == 0 &&
                                           heads.query.end % group == 0);
  return heads;
}

Tensor document_mask(const Tensor& documents, torch::ScalarType dtype) {
  if (documents.dim() != 2) {
    throw ConfigError(
        "documents are [batch, sequence], but these are " +
        text(documents.sizes()));
  }
  const torch::NoGradGuard no_grad;
  const auto others = documents.unsqueeze(2) != documents.unsqueeze(1);
  return causal_mask(documents.size(1), 0, documents.options().dtype(dtype))
      .masked_fill(others, -std::numeric_limits<double>::infinity())
      .unsqueeze(1);
}

ParallelAttention::ParallelAttention(
    const AttentionOptions& options, TensorParallel parallel, std::string label)
    : options_(options),
      parallel_(std::move(parallel)),
      label_(std::move(label)) {
  const auto& shape = options_.shape;
  check_attention(shape, parallel_.size());
  if (options_.scale == 0) {
    options_.scale = 1 / std::sqrt(static_cast<double>(shape.size_of_head()));
  }
  heads_ = heads_of(shape, parallel_.rank(), parallel_.size());
  queries_of_kv_ = queries_of_kv(heads_, shape.group());
  if (options_.latent) {
    add_latent();
  } else if (options_.fused) {
    in_ = {add_projection("c_attn", true, true, true)};
  } else {
    in_ = {
        add_projection("q_proj", true, false, false),
        add_projection("k_proj", false, true, false),
        add_projection("v_proj", false, false, true)};
  }
  if (options_.qk_norm_eps > 0) {
    const auto norm = [&](const std::string& name) {
      return register_module(
          name, std::make_shared<RMSNorm>(
                    shape.size_of_head(), options_.qk_norm_eps, parallel_,
                    /*of_heads=*/true, options_.qk_norm_adds_one));
    };
    query_norm_ = norm("q_norm");
    key_norm_ = norm("k_norm");
  }
  const std::string out = options_.fused ? "c_proj" : "o_proj";
  const int64_t size =
      options_.latent ? options_.latent->value_size : shape.size_of_head();
  const auto features = times(heads_.query, size, 0);
  out_ = register_module(
      out, std::make_shared<RowParallelLinear>(
               LinearShape{
                   .in = shape.heads * size,
                   .out = shape.hidden,
                   .bias = options_.bias,
                   .layout = options_.fused ? WeightLayout::in_out
                                            : WeightLayout::out_in},
               parallel_, label_ + "." + out,
               Shard{.pieces = {features}, .owned = {features}}));
}

// The matrix that computes this rank's queries, keys or values, or all of them.
std::shared_ptr<ColumnParallelLinear> ParallelAttention::add_projection(
    const std::string& name, bool query, bool key, bool value) {
  const auto& shape = options_.shape;
  const int64_t size = shape.size_of_head();
  Shard features;
  int64_t end = 0;
  const auto add = [&](int64_t heads, IndexRange here, IndexRange owned) {
    features.pieces.push_back(times(here, size, end));
    if (owned.size() > 0) features.owned.push_back(times(owned, size, end));
    end += heads * size;
  };
  if (query) add(shape.heads, heads_.query, heads_.query);
  if (key) add(shape.num_kv_heads(), heads_.kv, heads_.kv_owned);
  if (value) add(shape.num_kv_heads(), heads_.kv, heads_.kv_owned);
  const LinearShape matrix{
      .in = shape.hidden,
      .out = end,
      .bias = options_.bias || options_.qkv_bias,
      .layout = options_.fused ? WeightLayout::in_out : WeightLayout::out_in};
  return register_module(
      name, std::make_shared<ColumnParallelLinear>(
                matrix, parallel_, label_ + "." + name, features,
                heads_.shares_kv && (key || value)));
}

// A matrix of which a rank has the rows of its heads, `size` for each.
std::shared_ptr<ColumnParallelLinear> ParallelAttention::add_heads(
    const std::string& name, int64_t in, int64_t size) {
  const auto own = times(heads_.query, size, 0);
  return register_module(
      name,
      std::make_shared<ColumnParallelLinear>(
          LinearShape{
              .in = in, .out = options_.shape.heads * size, .bias = false},
          parallel_, label_ + "." + name,
          Shard{.pieces = {own}, .owned = {own}}, /*shared=*/false));
}

void ParallelAttention::add_latent() {
  const auto& latent = *options_.latent;
  const auto& shape = options_.shape;
  const int64_t size = latent.nope_size + latent.rope_size;
  ECHELON_CHECK(
      options_.rotary && !options_.fused && shape.group() == 1 &&
          shape.size_of_head() == size,
      "{}: latent attention with heads of {}, {} of them for keys", label_,
      shape.size_of_head(), shape.num_kv_heads());
  const auto down = [&](const std::string& name, int64_t out) {
    return register_module(
        name,
        std::make_shared<CompressingLinear>(shape.hidden, out, parallel_));
  };
  const auto norm = [&](const std::string& name, int64_t width) {
    return register_module(
        name, std::make_shared<RMSNorm>(width, latent.norm_eps, parallel_));
  };
  if (latent.query_rank > 0) {
    query_down_ = down("q_a_proj", latent.query_rank);
    query_norm_ = norm("q_a_layernorm", latent.query_rank);
    query_up_ = add_heads("q_b_proj", latent.query_rank, size);
  } else {
    query_up_ = add_heads("q_proj", shape.hidden, size);
  }
  key_value_down_ =
      down("kv_a_proj_with_mqa", latent.key_value_rank + latent.rope_size);
  key_norm_ = norm("kv_a_layernorm", latent.key_value_rank);
  key_value_up_ = add_heads(
      "kv_b_proj", latent.key_value_rank, latent.nope_size + latent.value_size);
}

Tensor
ParallelAttention::forward(const Tensor& x, const AttentionFrame& frame) {
  check_input(x, frame, parallel_, options_.shape.hidden, label_);
  const auto qkv =
      options_.latent ? project_latent(x, frame) : project(x, frame);
  auto y = attend(qkv, frame);  // [batch, sequence, features_r]
  if (parallel_.splits_tokens()) y = y.flatten(0, 1);
  return out_->forward(y);
}

// For the tokens of this rank's part of the frame.
RotaryTable ParallelAttention::rotations(
    const AttentionFrame& frame, const torch::TensorOptions& like) const {
  const int64_t size = options_.latent ? options_.latent->rope_size
                                       : options_.shape.size_of_head();
  if (parallel_.context.is_used()) {
    return rotary_table(
        *options_.rotary, size, parallel_.context.pieces_of(frame.total), like);
  }
  const int64_t past = frame.cache ? frame.cache->length : 0;
  return rotary_table(*options_.rotary, size, past, frame.sequence, like);
}

// All that heads are computed from enters the region of this rank's heads as
// one tensor, with one collective in each direction.
ParallelAttention::QueryKeyValue ParallelAttention::project_latent(
    const Tensor& x, const AttentionFrame& frame) {
  const auto& latent = *options_.latent;
  const auto& group = parallel_.group;
  const int64_t tokens = frame.batch * frame.sequence;
  const auto compressed = key_value_down_->forward(x).split_with_sizes(
      {latent.key_value_rank, latent.rope_size}, -1);
  std::vector<Tensor> parts = {
      key_norm_->forward(compressed[0]), compressed[1]};
  if (query_down_) {
    parts.push_back(query_norm_->forward(query_down_->forward(x)));
  }
  auto all = at::cat(parts, -1);
  all = parallel_.splits_tokens()
            ? all_gather(
                  all, group, 0, even_split(tokens, group.size()),
                  label_ + " gather")
            : copy_to(all, group, label_ + " input gradient");
  const auto entered = all.split_with_sizes(
      {latent.key_value_rank, latent.rope_size,
       latent.query_rank > 0 ? latent.query_rank : 0},
      -1);
  const int64_t own = heads_.query.size();  // and as many of keys
  // There may be no sample.
  const auto heads = [&](const Tensor& features, int64_t count, int64_t size) {
    return features.view({frame.batch, frame.sequence, count, size});
  };
  const auto up = [&](const Tensor& features, const auto& matrix) {
    return at::linear(features.flatten(0, -2), matrix->weight);
  };
  const int64_t size = options_.shape.size_of_head();
  const auto query = heads(
      query_down_ ? up(entered[2], query_up_) : query_up_->forward(x, tokens),
      own, size);
  const auto key_value =
      heads(
          up(entered[0], key_value_up_), own,
          latent.nope_size + latent.value_size)
          .split_with_sizes({latent.nope_size, latent.value_size}, -1);
  const auto table = rotations(frame, query.options());
  const auto rotated = [&](const Tensor& features) {
    return rotate(features, table, RotaryPairs::neighbours);
  };
  const auto shared_key = rotated(heads(entered[1], 1, latent.rope_size));
  return {
      at::cat(
          {query.narrow(-1, 0, latent.nope_size),
           rotated(query.narrow(-1, latent.nope_size, latent.rope_size))},
          -1),
      at::cat({key_value[0], shared_key.expand({-1, -1, own, -1})}, -1),
      key_value[1]};
}

ParallelAttention::QueryKeyValue
ParallelAttention::project(const Tensor& x, const AttentionFrame& frame) {
  const int64_t size = options_.shape.size_of_head();
  const int64_t tokens = frame.batch * frame.sequence;
  const auto heads = [&](const Tensor& features) {
    return features.view(
        {frame.batch, frame.sequence, features.size(-1) / size, size});
  };
  if (options_.rotary && !query_norm_) {
    const auto all = ColumnParallelLinear::forward_joined(
        in_, x, tokens, label_ + ".qkv_proj");
    if (all.defined()) {
      const auto parts = rotate_queries_and_keys(
          heads(all), heads_.query.size(), heads_.kv.size(),
          rotations(frame, all.options()));
      return {parts[0], parts[1], parts[2]};
    }
  }
  auto outputs = ColumnParallelLinear::forward_all(
      in_, x, tokens, label_ + (options_.fused ? ".c_attn" : ".qkv_proj"));
  const int64_t kv = heads_.kv.size() * size;
  if (options_.fused) {
    outputs =
        outputs[0].split_with_sizes({heads_.query.size() * size, kv, kv}, -1);
  }
  for (auto& output : outputs) output = heads(output);
  QueryKeyValue qkv{outputs[0], outputs[1], outputs[2]};
  if (query_norm_) {
    qkv.query = query_norm_->forward(qkv.query);
    qkv.key = key_norm_->forward(qkv.key);
  }
  if (options_.rotary) {
    const auto table = rotations(frame, qkv.query.options());
    qkv.query = rotate(qkv.query, table);
    qkv.key = rotate(qkv.key, table);
  }
  return qkv;
}

Tensor ParallelAttention::attend(
    const QueryKeyValue& qkv, const AttentionFrame& frame) {
  auto [query, key, value] = qkv;
  if (parallel_.context.is_used()) return attend_in_context(qkv, frame);
  const int64_t past = frame.cache ? frame.cache->length : 0;
  Tensor mask = frame.mask;
  if (frame.cache) {
    if (mask.defined()) {
      throw ConfigError(
          label_ +
          ": documents are not told apart in generation; leave the "
          "mask undefined when there is a cache");
    }
    key = append(frame.cache->keys, key, past);
    value = append(frame.cache->values, value, past);
    frame.cache->length += frame.sequence;
    if (past > 0 && frame.sequence > 1) {
      mask = causal_mask(frame.sequence, past, query.options());
    }
  }
  if (options_.window > 0 && past + frame.sequence > options_.window) {
    mask =
        in_window(mask, options_.window, frame.sequence, past, query.options());
  }
  const bool drops = options_.dropout > 0 && is_training();
  const bool plain = drops || options_.softcap > 0;
  const bool grouped_kernel = !plain && groups_heads(key, mask.defined());
  const int64_t value_size = value.size(-1);
  const bool widens = !plain && computing_device(value) == torch::kCPU;
  if (widens) value = widened(value, key.size(-1));
  const QueryKeyValue heads_first{
      query.transpose(1, 2), for_queries(key.transpose(1, 2), grouped_kernel),
      for_queries(value.transpose(1, 2), grouped_kernel)};
  const bool causal = !mask.defined() && past == 0;
  if (plain) {
    if (causal) mask = causal_mask(frame.sequence, 0, query.options());
    return by_plain_formula(heads_first, mask, frame.keys)
        .transpose(1, 2)
        .flatten(2);
  }
  const bool grouped = heads_first.key.size(1) != heads_.query.size();
  const auto results = at::scaled_dot_product_attention(
      heads_first.query, heads_first.key, heads_first.value,
      mask.defined() ? std::make_optional(mask) : std::nullopt,
      /*dropout_p=*/0.0, causal, options_.scale, grouped);
  return narrowed(results, value_size).transpose(1, 2).flatten(2);
}

// Attention over sequences of which this rank has some tokens.
Tensor ParallelAttention::attend_in_context(
    QueryKeyValue qkv, const AttentionFrame& frame) {
  if (frame.cache) {
    throw ConfigError(
        label_ +
        ": sequences are not cut in generation; build the model without a "
        "context-parallel group");
  }
  const int64_t value_size = qkv.value.size(-1);
  if (value_size > qkv.key.size(-1)) {
    throw ConfigError(format(
        "{}: heads of values have {} features and those of keys {}, but "
        "sequences that are cut over ranks need as many of keys or more; set "
        "[layout] cp=1",
        label_, value_size, qkv.key.size(-1)));
  }
  qkv.value = widened(qkv.value, qkv.key.size(-1));
  ContextAttentionCall call{
      .sequence = frame.total,
      .documents = frame.documents,
      .window = options_.window,
      .scale = options_.scale,
      .softcap = options_.softcap,
      .label = label_};
  for (size_t kv = 0; kv < queries_of_kv_.size(); ++kv) {
    call.kv_of_query.insert(
        call.kv_of_query.end(), static_cast<size_t>(queries_of_kv_[kv]),
        static_cast<int64_t>(kv));
  }
  if (options_.dropout > 0 && is_training()) {
    call.dropout = options_.dropout;
    call.kept =
        [first = heads_.query.begin, total = frame.total,
         keys_of_samples = frame.keys,
         source =
             DropoutSource{
                 options_.dropout, dropout_stream(label_ + ".attn_dropout")}](
            const Tensor& like, int64_t first_head, const IndexRange& queries,
            const IndexRange& keys) {
          const int64_t head = first + first_head;
          return detail::keep_mask(
                     like.flatten(0, 2), keys_of_samples, source,
                     place_of_scores(
                         {head, head + like.size(1)}, queries, keys, total))
              .view(like.sizes());
        };
  }
  const auto results =
      context_attention(qkv.query, qkv.key, qkv.value, parallel_.context, call);
  return narrowed(results, value_size).flatten(2);
}

// The plain formula for [batch, heads, positions, size]. `mask` is undefined
// when a single query attends to all positions.
Tensor ParallelAttention::by_plain_formula(
    const QueryKeyValue& qkv, const Tensor& mask, const Tensor& keys) const {
  auto scores = at::matmul(qkv.query * options_.scale, qkv.key.transpose(2, 3));
  if (options_.softcap > 0) {
    scores = at::tanh(scores / options_.softcap) * options_.softcap;
  }
  if (mask.defined()) scores = scores + mask;
  auto shares = at::softmax(scores, -1);
  if (options_.dropout == 0 || !is_training()) {
    return at::matmul(shares, qkv.value);
  }
  shares = dropout(
      shares, keys,
      {options_.dropout, dropout_stream(label_ + ".attn_dropout")},
      place_of_heads(heads_.query.begin, qkv.query.size(2), qkv.key.size(2)));
  return at::matmul(shares, qkv.value);
}

// Expands kv [batch, kv_heads_r, length, size] to one head per query head,
// which every kernel takes; a `grouped` kernel does not need it.
Tensor ParallelAttention::for_queries(const Tensor& kv, bool grouped) const {
  const int64_t queries = heads_.query.size();
  if (heads_.uniform) {
    if (kv.size(1) == queries || grouped) return kv;
    return kv.unsqueeze(2)
        .expand({-1, -1, queries / kv.size(1), -1, -1})
        .flatten(1, 2);
  }
  std::vector<Tensor> heads;
  for (size_t i = 0; i < queries_of_kv_.size(); ++i) {
    heads.push_back(kv.narrow(1, static_cast<int64_t>(i), 1)
                        .expand({-1, queries_of_kv_[i], -1, -1}));
  }
  return at::cat(heads, 1);
}

}  // namespace echelon
