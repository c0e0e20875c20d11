// A block is the list of operations that its framework launches, in order, on
// one rank of tp, cp and ep: matmuls, attention, collectives, and streams,
// which are operators bound by memory. A stream says how often it moves its
// elements and with how many kernels, in forward and in backward; fusing them
// changes these numbers alone. LayerBuilder adds the backward of each operation
// and marks what selective recompute repeats.
#include "echelon/cost/layer_work.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "echelon/cost/layer_builder.h"
#include "echelon/cost/strategy.h"

namespace echelon::cost {
namespace {

int64_t part(int64_t whole, int64_t degree) {
  return std::max<int64_t>(1, (whole + degree - 1) / degree);
}

/// Rows of the embedding on a rank. It is padded before it is sharded, so that
/// each shard is a multiple of 128.
int64_t vocabulary_part(
    const TransformerShape& shape, const Framework& framework, int64_t tp) {
  if (tp == 1 && !framework.pads_vocabulary) return shape.vocab;
  return (shape.vocab + 128 * tp - 1) / (128 * tp) * 128;
}

/// What every part of a block needs.
struct Sizes {
  int64_t tp, cp, seq, microbatch, tokens, sharded_tokens, hidden;
  bool sequence_parallel, masks;
  int64_t chunks;  // of a product
  ContextParallelOptions context;
  int64_t together;  // ranks of cp that exchange heads

  Sizes(
      const TransformerShape& shape, const Strategy& strategy, int64_t seq_len)
      : tp(strategy.layout.tp),
        cp(strategy.layout.cp),
        seq(part(seq_len, strategy.layout.cp)),
        microbatch(strategy.microbatch_size),
        tokens(seq * microbatch),
        sharded_tokens(
            strategy.sequence_parallel ? part(tokens, strategy.layout.tp)
                                       : tokens),
        hidden(shape.hidden),
        sequence_parallel(strategy.sequence_parallel && tp > 1),
        masks(strategy.masks_attention),
        chunks(
            tp > 1 ? std::clamp<int64_t>(
                         strategy.product_chunks, 1,
                         sequence_parallel ? sharded_tokens : tokens)
                   : 1),
        context(strategy.context),
        together(
            find_framework(strategy.framework).context_ways
                ? head_ranks(strategy.context, strategy.layout.cp)
                : 1) {}
  double elements() const { return as_double(tokens) * as_double(hidden); }
  double sharded_elements() const {
    return as_double(sharded_tokens) * as_double(hidden);
  }
};

/// The collectives of tp around the matrices that it shards: a matmul whose
/// columns are sharded begins a region, and one whose rows are sharded ends it.
class Region {
 public:
  Region(const Sizes& sizes, const Framework& framework, LayerBuilder& build)
      : sizes_(sizes), framework_(framework), build_(build) {}

  /// Stands before a matmul with so many columns on a rank: forward copies,
  /// backward sums. 0: what follows is no single matmul.
  void enter(int64_t columns) {
    const bool beside = framework_.overlaps_products && columns > 0;
    const LayerBuilder::Beside weight{sizes_.hidden, columns, sizes_.tokens};
    const LayerBuilder::Beside input{sizes_.tokens, sizes_.hidden, columns};
    if (!sizes_.sequence_parallel) {
      add("sum gradients of inputs", CollectiveKind::all_reduce, weight, beside,
          /*forward=*/false);
      return;
    }
    add("gather sequence", CollectiveKind::all_gather,
        {sizes_.tokens, columns, sizes_.hidden, sizes_.chunks, sizes_.tp},
        beside, true);
    add("sharded sequence", CollectiveKind::reduce_scatter, weight, beside,
        false);
    // The all-gathered input is not kept: weights' gradients need it again.
    add("gather sequence again", CollectiveKind::all_gather, input, beside,
        false, 0.5);
  }
  /// The matmul that stands behind enter().
  void begin(const std::string& name, int64_t columns, bool bias) {
    const bool chunks =
        framework_.overlaps_products && sizes_.sequence_parallel;
    build_.linear(
        name, sizes_.tokens, columns, sizes_.hidden, bias, 1, false,
        {.forward = chunks ? sizes_.chunks : 1, .batches = sizes_.tp});
  }

  /// The matmul of so many inner features on a rank that stands before leave().
  void end(const std::string& name, int64_t inner, bool bias) {
    const bool cut = sizes_.sequence_parallel;
    const int64_t chunks = framework_.overlaps_products ? sizes_.chunks : 1;
    build_.linear(
        name, sizes_.tokens, sizes_.hidden, inner, bias, 1, false,
        {.forward = chunks,
         .backward = cut ? chunks : 1,
         .batches = cut ? sizes_.tp : 1});
    if (!cut || chunks == 1) return;
    // Rows of gradients came chunk by chunk.
    build_.reorder(
        name + " in the order of chunks",
        as_double(sizes_.tokens * std::min(inner, sizes_.hidden)), chunks);
  }
  /// Stands behind such a matmul: forward sums, backward copies. 0: what stands
  /// before is no single matmul.
  void leave(const std::string& name, int64_t inner) {
    const bool beside = framework_.overlaps_products && inner > 0;
    const bool cut = sizes_.sequence_parallel;
    const int64_t batches = cut ? sizes_.tp : 1;
    add(cut ? name + " sharded sequence" : name + " sum",
        cut ? CollectiveKind::reduce_scatter : CollectiveKind::all_reduce,
        {sizes_.tokens, sizes_.hidden, inner, sizes_.chunks, batches}, beside,
        true);
    if (!cut) return;
    add(name + " gather sequence", CollectiveKind::all_gather,
        {sizes_.tokens, inner, sizes_.hidden, sizes_.chunks, batches}, beside,
        false);
  }

 private:
  /// `least`: the share that is hidden at least, where no matmul is said.
  void
  add(const std::string& name, CollectiveKind kind,
      const LayerBuilder::Beside& product, bool beside, bool forward,
      double least = 0) {
    const double bytes = build_.element_bytes() * sizes_.elements();
    if (beside) {
      build_.collective_beside(name, kind, bytes, product, forward);
      return;
    }
    const double hidden = forward ? framework_.hidden_tensor_parallel
                                  : framework_.hidden_backward_tensor_parallel;
    build_.collective(
        name, Axis::tp, kind, bytes, std::max(least, hidden), forward);
  }

  const Sizes& sizes_;
  const Framework& framework_;
  LayerBuilder& build_;
};

class BlockBuilder {
 public:
  BlockBuilder(
      const TransformerShape& shape, const Strategy& strategy,
      const Framework& framework, int64_t seq_len, bool experts, double busiest)
      : shape_(shape),
        framework_(framework),
        sizes_(shape, strategy, seq_len),
        ep_(strategy.layout.ep),
        experts_(experts),
        busiest_(busiest),
        build_(experts ? "expert block" : "block", strategy, framework),
        region_(sizes_, framework, build_) {}

  LayerWork work(int64_t repeat) {
    norm();
    shape_.latent ? latent_attention() : attention();
    if (shape_.post_norms) norm();
    residual();
    norm();
    if (experts_) {
      region_.enter(0);
      mixture();
      region_.leave("feed-forward", 0);
    } else {
      const int64_t columns = part(shape_.ffn_size(), sizes_.tp);
      region_.enter(shape_.gated ? 2 * columns : columns);
      feed_forward(shape_.ffn_size());
      region_.leave("feed-forward", columns);
    }
    if (shape_.post_norms) norm();
    residual();
    LayerWork done = build_.finish(sizes_.sharded_elements());
    done.repeat = repeat;
    return done;
  }

 private:
  void norm() {
    build_.stream(
        "norm", sizes_.sharded_elements(), 2, 4, 1,
        framework_.norm_gradient_kernels);
    build_.parameters(
        as_double(shape_.hidden) * (shape_.rms_norm ? 1 : 2),
        shape_.rms_norm ? 1 : 2);
  }

  /// Dropout and sum: what a layer ends with.
  void residual() {
    const double mask = framework_.dropout ? 0.5 : 0;
    if (framework_.fused_elementwise) {
      build_.stream(
          "residual", sizes_.sharded_elements(), 3 + mask, 2 + mask, 1, 1);
    } else {
      build_.stream(
          "residual", sizes_.sharded_elements(), framework_.dropout ? 5.5 : 3,
          framework_.dropout ? 4.5 : 2, framework_.dropout ? 2 : 1,
          framework_.dropout ? 2 : 1);
    }
  }

  void attention() {
    const int64_t heads = part(shape_.heads, sizes_.tp);
    const int64_t kv_heads = part(shape_.key_value_heads(), sizes_.tp);
    const int64_t d = shape_.head_size();
    region_.enter((heads + 2 * kv_heads) * d);
    region_.begin(
        "queries, keys, values", (heads + 2 * kv_heads) * d, shape_.biases);
    rotary(as_double((heads + kv_heads) * d));
    exchange_heads(heads, kv_heads, d, d);
    const int64_t kv = std::max(kv_heads, sizes_.together);
    exchange_keys(heads, as_double(2 * kv * d), 4 * d);
    if (cuts_attention()) merge_blocks(heads, kv, d);
    core(heads, d, d, as_double((2 * heads + 2 * kv_heads) * d));
    region_.end("attention output", heads * d, shape_.biases);
    region_.leave("attention", heads * d);
  }

  void latent_attention() {
    const LatentAttention& latent = *shape_.latent;
    const int64_t heads = part(shape_.heads, sizes_.tp);
    const int64_t query_dim = latent.nope_dim + latent.rope_dim;
    const int64_t tokens = sizes_.tokens, hidden = sizes_.hidden;
    region_.enter(0);
    if (latent.query_rank > 0) {
      build_.linear("queries down", tokens, latent.query_rank, hidden, false);
      build_.linear(
          "queries up", tokens, heads * query_dim, latent.query_rank, false);
    } else {
      build_.linear("queries", tokens, heads * query_dim, hidden, false);
    }
    build_.linear(
        "keys, values down", tokens, latent.key_value_rank + latent.rope_dim,
        hidden, false);
    build_.linear(
        "keys, values up", tokens, heads * (latent.nope_dim + latent.value_dim),
        latent.key_value_rank, false);
    rotary(as_double((heads + 1) * query_dim));
    exchange_heads(heads, heads, query_dim, latent.value_dim);
    exchange_keys(
        heads, as_double(heads * (query_dim + latent.value_dim)),
        2 * (query_dim + latent.value_dim));
    // Values are as wide as keys there.
    if (cuts_attention()) merge_blocks(heads, heads, query_dim);
    core(
        heads, query_dim, latent.value_dim,
        as_double(2 * heads * (query_dim + latent.value_dim)));
    region_.end("attention output", heads * latent.value_dim, false);
    region_.leave("attention", heads * latent.value_dim);
  }

  void rotary(double width) {
    if (shape_.positions > 0) return;
    const bool fused = framework_.fused_elementwise;
    build_.stream(
        "rotary", as_double(sizes_.tokens) * width, fused ? 2 : 6,
        fused ? 2 : 6, fused ? 2 : 8, fused ? 2 : 8);
  }

  bool cuts_attention() const {
    return framework_.context_ways && sizes_.cp > 1;
  }

  /// Context parallelism: neighbours exchange heads for tokens, queries, keys
  /// and values before attention and its results behind it. A head that several
  /// of them use is sent to each.
  void exchange_heads(
      int64_t heads, int64_t kv_heads, int64_t query_dim, int64_t value_dim) {
    if (sizes_.together == 1) return;
    const int64_t kv = std::max(kv_heads, sizes_.together);
    const std::pair<const char*, int64_t> sent[] = {
        {"exchange heads of queries", heads * query_dim},
        {"exchange heads of keys", kv * query_dim},
        {"exchange heads of values", kv * value_dim},
        {"exchange heads of outputs", heads * value_dim}};
    for (const bool forward : {true, false}) {
      for (const auto& [name, width] : sent) {
        build_.collective(
            name,
            {.bytes = build_.element_bytes() * as_double(sizes_.tokens * width),
             .collective = CollectiveKind::all_to_all,
             .axis = Axis::cp,
             .members = sizes_.together},
            forward);
        // Parts are made one tensor, and one tensor of the parts.
        build_.copy(name, as_double(sizes_.tokens * width), forward);
      }
    }
  }

  /// Context parallelism: every rank sees all keys and values, of `width`
  /// elements a token. `pair_width`: the multiplications of a pair of tokens in
  /// a head, twice.
  void exchange_keys(int64_t heads, double width, int64_t pair_width) {
    if (framework_.context_ways) {
      const int64_t parts = sizes_.cp / sizes_.together;
      // Those of the heads here, for the tokens of all neighbours.
      const double part = as_double(sizes_.tokens) * width;
      const bool gathers = sizes_.context.way == ContextWay::all_gather;
      if (parts > 1 && !gathers) {
        pass_keys(heads, part, pair_width, parts);
        return;
      }
      if (parts == 1) return;
    }
    const double bytes =
        build_.element_bytes() * as_double(sizes_.tokens * sizes_.cp) * width;
    const double hidden =
        framework_.context_ways ? 0 : framework_.hidden_context_parallel;
    const auto exchange = [&](const char* name, CollectiveKind kind,
                              bool forward) {
      build_.collective(name, Axis::cp, kind, bytes, hidden, forward);
    };
    exchange("gather keys, values", CollectiveKind::all_gather, true);
    exchange("gather keys, values again", CollectiveKind::all_gather, false);
    exchange(
        "sharded gradients of keys, values", CollectiveKind::reduce_scatter,
        false);
  }

  /// Messages to the next of `parts` ranks, one less than there are, each while
  /// attention to the part before computes. In backward the sums of gradients
  /// go one message further.
  void
  pass_keys(int64_t heads, double elements, int64_t pair_width, int64_t parts) {
    const double others = as_double(parts - 1);
    // Scores that are computed for one part of the others'.
    const double pairs = as_double(sizes_.microbatch * heads) *
                         as_double(sizes_.seq) * as_double(sizes_.seq) *
                         as_double(sizes_.cp) / as_double(parts) *
                         (shape_.causal ? 0.5 : 1);
    Operation message{
        .times = others,
        .flops_beside = pairs * as_double(pair_width),
        .bytes = build_.element_bytes() * elements,
        .collective = CollectiveKind::send,
        .axis = Axis::cp,
        .members = parts,
        .apart = sizes_.together,
        .hideable = framework_.hidden_context_parallel};
    build_.collective("pass keys, values", message, true);
    message.backward = true;
    message.flops_beside *= 1.25;  // half of backward, which has as many
    build_.collective("pass keys, values again", message, false);
    message.bytes = build_.sum_bytes() * elements;
    build_.collective("pass gradients of keys, values", message, false);
  }

  /// The scores of blocks, where no fused kernel masks them, and what is made
  /// of them in the dtype of sums (parallel/context/block_attention.h).
  void masked_core(
      int64_t heads, int64_t query_dim, int64_t value_dim, double scores) {
    // Of the pieces of a cut, each sees those before it and itself.
    const double pieces = as_double(2 * sizes_.cp);
    const double seen = (pieces + 1) / (2 * pieces);
    const int64_t many = sizes_.microbatch * heads;
    const auto keys =
        static_cast<int64_t>(seen * as_double(sizes_.seq * sizes_.cp));
    const double wide = build_.sum_bytes() / build_.element_bytes();
    build_.product("scores", many, sizes_.seq, keys, query_dim);
    build_.stream(
        "softmax of blocks", scores * seen, 14 * wide, 18 * wide, 12, 14);
    build_.product("values", many, sizes_.seq, value_dim, keys);
  }

  /// What attention to blocks of keys moves beside the scores
  /// (context_attention in parallel/context/): keys and values with a head for
  /// each of queries, and results and gradients, which become elements of sums
  /// and are added.
  void merge_blocks(int64_t heads, int64_t kv_heads, int64_t head_dim) {
    const int64_t blocks = sizes_.cp / sizes_.together;
    // Other ranks' blocks have half of the rows or half of the columns: three
    // quarters of either on average.
    const double others = 0.75 * as_double(blocks - 1);
    const double wide = build_.sum_bytes() / build_.element_bytes();
    const double cast = wide > 1 ? 1 + wide : 0;
    const double add = 3 * wide;  // two are read, one is written
    const double share = as_double(kv_heads) / as_double(heads);
    const bool grouped = kv_heads < heads;
    const double repeat = grouped ? 1 + share : 0;
    const double sum_repeated = grouped ? wide * (1 + share) : 0;
    const double results = 2 * cast + others * (cast + add);
    const double sums = share * (wide + add);  // wide: zeros
    build_.stream(
        "merge blocks", as_double(sizes_.tokens * heads * head_dim),
        results + 2 + 2 * (1 + others) * repeat,
        results + 2 * (1 + others) * (repeat + cast + sum_repeated + sums),
        7 * blocks, 12 * blocks);
  }

  /// Scores, their softmax, values.
  void core(int64_t heads, int64_t query_dim, int64_t value_dim, double width) {
    const int64_t keys = sizes_.seq * sizes_.cp;
    const double scores = as_double(sizes_.microbatch * heads) *
                          as_double(sizes_.seq) * as_double(keys);
    if (cuts_attention() && sizes_.masks) {
      masked_core(heads, query_dim, value_dim, scores);
      return;
    }
    if (framework_.fused_attention) {
      build_.fused_attention(
          2 * scores * as_double(query_dim + value_dim) *
              (shape_.causal ? 0.5 : 1),
          as_double(sizes_.tokens) * width);
      return;
    }
    build_.stream(
        "heads first", as_double(sizes_.tokens) * width, 1.5, 1.5, 3, 4);
    build_.begin_selective();
    const int64_t many = sizes_.microbatch * heads;
    build_.product("scores", many, sizes_.seq, keys, query_dim);
    const bool fused = framework_.fused_elementwise;
    build_.stream(
        "softmax", scores, fused ? 2 : 7, fused ? 3 : 5, fused ? 1 : 4,
        fused ? 1 : 3);
    if (framework_.dropout) build_.stream("dropout", scores, 2.5, 2.5, 1, 1);
    build_.product("values", many, sizes_.seq, value_dim, keys);
    build_.end_selective();
  }

  void feed_forward(int64_t size) {
    const int64_t columns = part(size, sizes_.tp);
    region_.begin(
        "feed-forward in", shape_.gated ? 2 * columns : columns, shape_.biases);
    activation(as_double(sizes_.tokens) * as_double(columns));
    region_.end("feed-forward out", columns, shape_.biases);
  }

  void activation(double elements) {
    const bool fused = framework_.fused_elementwise;
    if (shape_.gated) {
      build_.stream(
          "activation", elements, fused ? 3 : 5, fused ? 5 : 8, fused ? 1 : 2,
          fused ? 1 : 3);
    } else {
      build_.stream("activation", elements, 2, 3, 1, fused ? 1 : 2);
    }
  }

  /// Experts of the busiest rank: where they are balanced, it computes as many
  /// token copies as its own tokens have.
  void mixture() {
    const ExpertShape& mix = shape_.experts;
    const int64_t local = part(mix.experts, ep_);
    const auto copies = static_cast<int64_t>(std::llround(
        busiest_ * as_double(sizes_.tokens * mix.experts_per_token)));
    const double width = as_double(sizes_.hidden);
    const double sent = as_double(sizes_.sharded_tokens) *
                        as_double(mix.experts_per_token) * width;
    build_.linear("router", sizes_.tokens, mix.experts, sizes_.hidden, false);
    build_.stream("sort tokens", sent, 4, 4, 6, 6);
    build_.wait_for_host(
        framework_.expert_host_seconds, framework_.expert_host_seconds);
    dispatch("dispatch", busiest_ * sent);
    const int64_t rows = part(copies, local);
    const int64_t columns = part(mix.ffn, sizes_.tp);
    build_.linear(
        "experts in", rows, shape_.gated ? 2 * columns : columns, sizes_.hidden,
        false, local, true);
    activation(as_double(copies) * as_double(columns));
    build_.linear(
        "experts out", rows, sizes_.hidden, columns, false, local, true);
    if (shape_.biases) {
      // Added one expert after the other, beside an activation that is not
      // fused ([fit] gpt-oss).
      build_.stream(
          "expert biases", as_double(copies) * (3 * as_double(columns) + width),
          4, 4, 2 * local, 2 * local);
    }
    dispatch("combine", busiest_ * sent);
    build_.stream("sum copies", sent, 3, 3, 4, 4);
    if (mix.shared_ffn > 0) feed_forward(mix.shared_ffn);
  }

  void dispatch(const std::string& name, double elements) {
    const double bytes = build_.element_bytes() * elements;
    for (const bool forward : {true, false}) {
      build_.collective(
          name, Axis::ep, CollectiveKind::all_to_all, bytes,
          framework_.hidden_expert_parallel, forward);
    }
  }

  const TransformerShape& shape_;
  const Framework& framework_;
  Sizes sizes_;
  int64_t ep_;
  bool experts_;
  double busiest_;  // tokens of the busiest rank of experts over the mean
  LayerBuilder build_;
  Region region_;
};

LayerWork embedding(
    const TransformerShape& shape, const Strategy& strategy,
    const Framework& framework, int64_t seq_len) {
  const Sizes sizes(shape, strategy, seq_len);
  LayerBuilder build("embedding", strategy, framework);
  build.stream("look up", sizes.elements(), framework.dropout ? 5 : 3, 3, 5, 4);
  build.collective(
      "embedding sum", Axis::tp,
      sizes.sequence_parallel ? CollectiveKind::reduce_scatter
                              : CollectiveKind::all_reduce,
      build.element_bytes() * sizes.elements(), 0, true);
  build.parameters(
      as_double(vocabulary_part(shape, framework, sizes.tp)) *
          as_double(shape.hidden),
      2);
  if (shape.positions > 0) {
    build.parameters(as_double(shape.positions) * as_double(shape.hidden), 2);
  }
  LayerWork work = build.finish(sizes.sharded_elements());
  work.again.clear();
  return work;
}

LayerWork head(
    const TransformerShape& shape, const Strategy& strategy,
    const Framework& framework, int64_t seq_len) {
  const Sizes sizes(shape, strategy, seq_len);
  LayerBuilder build("head", strategy, framework);
  build.stay_in_16_bit();
  build.stream("norm", sizes.sharded_elements(), 2, 4, 1, 2);
  build.parameters(as_double(shape.hidden) * (shape.rms_norm ? 1 : 2), 2);
  const int64_t vocab = vocabulary_part(shape, framework, sizes.tp);
  Region region(sizes, framework, build);
  region.enter(vocab);
  region.begin("logits", vocab, false);
  const double logits = as_double(sizes.tokens) * as_double(vocab);
  const bool kernels = framework.loss_kernels && build.element_bytes() <= 2;
  const double moved = framework.loss_bytes / build.element_bytes();
  build.stream(
      "loss", logits, kernels ? 1 : moved, kernels ? 2 : 0.5 * moved,
      kernels ? 3 : 10, kernels ? 2 : 5);
  for (int sums = 0; sums < 3; ++sums) {
    build.collective(
        "loss", Axis::tp, CollectiveKind::all_reduce,
        4.0 * as_double(sizes.tokens), 0, true);
  }
  LayerWork work = build.finish(0);
  work.again.clear();
  // A tied head on the embedding's rank is the embedding: its gradients are
  // summed, and it is updated, there.
  if (shape.tied && ends_on_one_rank(strategy)) {
    work.parameters -= as_double(vocab) * as_double(shape.hidden);
  }
  return work;
}

}  // namespace

std::vector<LayerWork> transformer_work(
    const ModelShape& model, const Strategy& strategy,
    const Framework& framework) {
  const TransformerShape& shape = *model.transformer;
  const int64_t seq_len = strategy.seq_len_or(model.seq_len);
  const double busiest = model.expert_load.of_busiest_rank(strategy.layout.ep);
  std::vector<LayerWork> layers = {
      embedding(shape, strategy, framework, seq_len)};
  for (int64_t first = 0; first < shape.layers;) {
    int64_t end = first + 1;
    const bool experts = shape.has_experts(first);
    while (end < shape.layers && shape.has_experts(end) == experts) ++end;
    layers.push_back(
        BlockBuilder(shape, strategy, framework, seq_len, experts, busiest)
            .work(end - first));
    first = end;
  }
  layers.push_back(head(shape, strategy, framework, seq_len));
  return layers;
}

double copied_embedding(
    const TransformerShape& shape, const Strategy& strategy,
    const Framework& framework) {
  if (!shape.tied || ends_on_one_rank(strategy)) return 0;
  return as_double(vocabulary_part(shape, framework, strategy.layout.tp)) *
         as_double(shape.hidden);
}

}  // namespace echelon::cost
