#include "echelon/cost/model_shape.h"

#include <algorithm>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::cost {
namespace {

// [in, out], with a bias where there is one.
double linear(int64_t in, int64_t out, bool bias) {
  return as_double(in) * as_double(out) + (bias ? as_double(out) : 0);
}

double norm_parameters(const TransformerShape& shape, int64_t width) {
  return as_double(width) * (shape.rms_norm || !shape.biases ? 1 : 2);
}

// Queries and keys and values through their small common vectors, and back.
double latent_attention_parameters(const TransformerShape& shape) {
  const LatentAttention& latent = *shape.latent;
  const int64_t queries = shape.heads * (latent.nope_dim + latent.rope_dim);
  double sum = latent.query_rank == 0
                   ? linear(shape.hidden, queries, false)
                   : linear(shape.hidden, latent.query_rank, false) +
                         linear(latent.query_rank, queries, false);
  sum += linear(shape.hidden, latent.key_value_rank + latent.rope_dim, false);
  sum += linear(
      latent.key_value_rank, shape.heads * (latent.nope_dim + latent.value_dim),
      false);
  return sum + linear(shape.heads * latent.value_dim, shape.hidden, false);
}

double attention_parameters(const TransformerShape& shape) {
  if (shape.latent) return latent_attention_parameters(shape);
  const bool bias = shape.biases || shape.qkv_biases;
  const int64_t queries = shape.heads * shape.head_size();
  const int64_t keys = shape.key_value_heads() * shape.head_size();
  return linear(shape.hidden, queries, bias) +
         2 * linear(shape.hidden, keys, bias) +
         linear(queries, shape.hidden, shape.biases);
}

double norms_of_block(const TransformerShape& shape) {
  double sum =
      (shape.post_norms ? 4 : 2) * norm_parameters(shape, shape.hidden);
  if (shape.qk_norm) sum += 2 * norm_parameters(shape, shape.head_size());
  if (shape.latent) {
    sum += norm_parameters(shape, shape.latent->query_rank) +
           norm_parameters(shape, shape.latent->key_value_rank);
  }
  return sum;
}

double feed_forward_parameters(const TransformerShape& shape, int64_t ffn) {
  return (shape.gated ? 2 : 1) * linear(shape.hidden, ffn, shape.biases) +
         linear(ffn, shape.hidden, shape.biases);
}

// Multiplications and additions of forward with weights, of one token and
// block.
double matrix_flops(const TransformerShape& shape, bool experts) {
  TransformerShape bare = shape;
  bare.biases = bare.qkv_biases = false;
  const BlockParameters block = block_parameters(bare, experts);
  double weights = block.attention + block.feed_forward;
  if (experts) {
    weights += block.router + block.experts *
                                  as_double(shape.experts.experts_per_token) /
                                  as_double(shape.experts.experts);
  }
  return 2 * weights;
}

double transformer_flops(
    const TransformerShape& shape, int64_t seq_len, bool full_attention) {
  const double tokens = as_double(seq_len);
  const double with_experts = as_double(shape.expert_layers());
  const double dense = as_double(shape.layers) - with_experts;
  double forward = tokens * dense * matrix_flops(shape, false);
  if (with_experts > 0)
    forward += tokens * with_experts * matrix_flops(shape, true);
  forward += tokens * 2 * as_double(shape.hidden) * as_double(shape.vocab);
  const int64_t windows = shape.window_layers();
  const double of_pair = 2 * as_double(shape.heads) *
                         as_double(shape.head_size() + shape.value_head_size());
  forward +=
      of_pair * (as_double(windows) *
                     attention_pairs(shape, seq_len, true, full_attention) +
                 as_double(shape.layers - windows) *
                     attention_pairs(shape, seq_len, false, full_attention));
  return 3 * forward;
}

// What causal attention leaves out of the FLOPs that were counted, of one
// sample.
double masked_flops(const CountedLayer& layer) {
  double sum = 0;
  for (const auto* pass : {&layer.forward, &layer.backward}) {
    for (const CountedOperator& one : *pass) {
      if (!one.causal || !one.product) continue;
      sum += as_double(one.count) *
             cluster::product_flops(
                 *one.product, as_double(one.m), as_double(one.n),
                 as_double(one.k)) /
             2;
    }
  }
  return layer.counted_samples > 0 ? sum / as_double(layer.counted_samples) : 0;
}

[[noreturn]] void refuse(const ModelShape& model, const std::string& what) {
  throw ConfigError("model " + model.name + ": " + what);
}

void check_attention(const ModelShape& model, const TransformerShape& shape) {
  if (shape.latent) {
    const LatentAttention& latent = *shape.latent;
    if (latent.key_value_rank < 1 || latent.value_dim < 1 ||
        latent.nope_dim + latent.rope_dim < 1 || latent.query_rank < 0) {
      refuse(
          model,
          "latent attention needs key_value_rank, value_dim and "
          "nope_dim or rope_dim of 1 or more");
    }
    return;
  }
  if (shape.heads % shape.key_value_heads() != 0) {
    refuse(
        model, format(
                   "{} heads share {} of keys and values; that must divide",
                   shape.heads, shape.key_value_heads()));
  }
  if (shape.head_dim == 0 && shape.hidden % shape.heads != 0) {
    refuse(
        model, format(
                   "hidden {} over {} heads is no whole number; give head_dim",
                   shape.hidden, shape.heads));
  }
}

void check_experts(const ModelShape& model, const ExpertShape& experts) {
  if (experts.experts == 0) return;
  if (experts.experts_per_token < 1 ||
      experts.experts_per_token > experts.experts) {
    refuse(
        model, format(
                   "a token takes {} of {} experts; 1 up to all of them can be",
                   experts.experts_per_token, experts.experts));
  }
  if (experts.ffn < 1 || experts.shared_ffn < 0 || experts.every < 1 ||
      experts.first_dense_layers < 0) {
    refuse(
        model,
        "experts need ffn and every of 1 or more, shared_ffn and "
        "first_dense_layers of 0 or more");
  }
}

void check_transformer(const ModelShape& model, const TransformerShape& shape) {
  const std::pair<const char*, int64_t> needed[] = {
      {"layers", shape.layers},
      {"hidden", shape.hidden},
      {"heads", shape.heads},
      {"vocab", shape.vocab}};
  for (const auto& [name, value] : needed) {
    if (value >= 1) continue;
    refuse(model, format("{} is {}; it must be 1 or more", name, value));
  }
  const bool negative = shape.kv_heads < 0 || shape.head_dim < 0 ||
                        shape.ffn < 0 || shape.positions < 0 ||
                        shape.window < 0 || shape.global_every < 0;
  if (negative) refuse(model, "a size is negative");
  check_attention(model, shape);
  check_experts(model, shape.experts);
}

}  // namespace

BlockParameters block_parameters(const TransformerShape& shape, bool experts) {
  BlockParameters block;
  block.attention = attention_parameters(shape);
  block.norms = norms_of_block(shape);
  if (!experts) {
    block.feed_forward = feed_forward_parameters(shape, shape.ffn_size());
    return block;
  }
  const ExpertShape& mixture = shape.experts;
  block.router = linear(shape.hidden, mixture.experts, shape.biases);
  block.experts =
      as_double(mixture.experts) * feed_forward_parameters(shape, mixture.ffn);
  if (mixture.shared_ffn > 0) {
    block.feed_forward = feed_forward_parameters(shape, mixture.shared_ffn);
  }
  return block;
}

double embedding_parameters(const TransformerShape& shape) {
  double sum =
      as_double(shape.vocab + shape.positions) * as_double(shape.hidden);
  if (shape.embedding_norm) sum += norm_parameters(shape, shape.hidden);
  return sum;
}

double head_parameters(const TransformerShape& shape) {
  return norm_parameters(shape, shape.hidden) +
         (shape.tied ? 0 : as_double(shape.vocab) * as_double(shape.hidden));
}

double attention_pairs(
    const TransformerShape& shape, int64_t seq_len, bool window, bool full) {
  const double tokens = as_double(seq_len);
  if (full || !shape.causal) return tokens * tokens;
  const double reach =
      window ? as_double(std::min(shape.window, seq_len)) : tokens;
  return reach * (reach + 1) / 2 + (tokens - reach) * reach;
}

double ModelShape::num_parameters() const {
  double sum = 0;
  for (const CountedLayer& layer : layers) sum += layer.parameters;
  if (!transformer) return sum;
  const double with_experts = as_double(transformer->expert_layers());
  const double dense = as_double(transformer->layers) - with_experts;
  return embedding_parameters(*transformer) + head_parameters(*transformer) +
         dense * block_parameters(*transformer, false).total() +
         (with_experts > 0
              ? with_experts * block_parameters(*transformer, true).total()
              : 0);
}

double ModelShape::active_parameters() const {
  const double all = num_parameters();
  if (!transformer || transformer->experts.experts == 0) return all;
  const ExpertShape& mixture = transformer->experts;
  const double idle = as_double(mixture.experts - mixture.experts_per_token) /
                      as_double(mixture.experts);
  return all - as_double(transformer->expert_layers()) * idle *
                   block_parameters(*transformer, true).experts;
}

double ModelShape::model_flops(int64_t length, bool full_attention) const {
  if (transformer) {
    return transformer_flops(
        *transformer, length > 0 ? length : seq_len, full_attention);
  }
  double sum = 0;
  for (const CountedLayer& layer : layers) {
    sum += layer.forward_flops + layer.backward_flops;
    if (!full_attention) sum -= masked_flops(layer);
  }
  return sum * as_double(layer_ranks);
}

void check(const ModelShape& model) {
  if (model.seq_len < 0) refuse(model, "seq_len is negative");
  if (model.transformer) return check_transformer(model, *model.transformer);
  if (model.layers.empty()) refuse(model, "has no layers");
}

}  // namespace echelon::cost
