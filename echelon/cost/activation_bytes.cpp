#include "echelon/cost/activation_bytes.h"

#include <algorithm>

namespace echelon {
namespace {

double as_double(int64_t value) {
  return static_cast<double>(value);
}

// Elements of one token in the tensors of one block on one rank. `whole` ones
// are cut by sequence parallelism alone, `cut` ones by tp.
struct BlockElements {
  double hidden = 0;      // whole: one tensor of the residual stream
  double projected = 0;   // cut: queries, keys, values, as attention takes them
  double compressed = 0;  // whole: what latent attention makes them of
  double attended = 0;    // cut: what attention gives
  double scores = 0;      // cut: of one token with all others
  double inner = 0;     // cut: feed-forward behind its first product, one half
  double halves = 1;    // 2: gated
  double gathered = 0;  // whole: tokens as experts are given them
};

double feed_forward_width(const TransformerShape& shape, bool experts) {
  if (!experts) return as_double(shape.ffn_size());
  return as_double(
      shape.experts.experts_per_token * shape.experts.ffn +
      shape.experts.shared_ffn);
}

BlockElements
elements_of(const ModelShape& model, const Strategy& strategy, bool experts) {
  const TransformerShape& shape = *model.transformer;
  const double tp = as_double(strategy.layout.tp);
  const double whole = strategy.sequence_parallel ? tp : 1;
  const double heads = as_double(shape.heads) / tp;
  const double keys = std::max(
      1.0,
      as_double(shape.latent ? shape.heads : shape.key_value_heads()) / tp);
  const double seq =
      as_double(strategy.seq_len > 0 ? strategy.seq_len : model.seq_len);
  BlockElements block;
  block.hidden = as_double(shape.hidden) / whole;
  block.projected =
      heads * as_double(shape.head_size()) +
      keys * as_double(shape.head_size() + shape.value_head_size());
  if (shape.latent) {
    block.compressed =
        2 * as_double(shape.latent->query_rank + shape.latent->key_value_rank) /
        whole;
  }
  block.attended = heads * as_double(shape.value_head_size());
  block.scores = heads * seq;
  block.inner = feed_forward_width(shape, experts) / tp;
  block.halves = shape.gated ? 2 : 1;
  if (experts) {
    // Sent to the experts, and what comes back before it is weighed.
    block.gathered =
        2 * as_double(shape.experts.experts_per_token) * block.hidden;
  }
  return block;
}

// What autograd keeps of the feed-forward's middle.
double inner_kept(const BlockElements& block, const Stack& stack) {
  return block.inner * (block.halves == 2 ? stack.memory.gated_kept : 2);
}

// Two norms with what they are given and give, attention and its products,
// masks.
double kept_without_scores(
    const BlockElements& block, const Stack& stack, double element) {
  double bytes =
      element * (4 * block.hidden + block.compressed + block.projected +
                 block.attended + inner_kept(block, stack) + block.gathered);
  if (stack.dropout) bytes += 2 * block.hidden;  // masks, of a byte
  return bytes;
}

// Softmax's result, and with dropout its mask and what it leaves; of the fused
// kernel one number a row.
double
scores_kept(const BlockElements& block, const Stack& stack, double element) {
  if (stack.fused_attention) return 0;
  return block.scores * (stack.dropout ? 2 * element + 1 : element);
}

double
selective_kept(const BlockElements& block, const Stack& stack, double element) {
  switch (stack.memory.selective) {
    case SelectiveWay::attention_scores:
      return kept_without_scores(block, stack, element);
    case SelectiveWay::keeps_products:
      return element * (3 * block.hidden + block.compressed + block.projected +
                        block.attended + block.halves * block.inner +
                        block.gathered) +
             scores_kept(block, stack, element) / 2;
    case SelectiveWay::keeps_half:
      break;
  }
  // Of seven products the first, third, fifth and seventh.
  return element * (2 * block.hidden + block.projected * 0.8 + block.attended +
                    block.inner + block.gathered);
}

}  // namespace

double element_bytes(Precision precision) {
  switch (precision) {
    case Precision::fp64:
      return 8;
    case Precision::fp32:
    case Precision::tf32:
      return 4;
    default:
      return 2;  // fp8 and fp4 are of products alone
  }
}

double rank_tokens(const ModelShape& model, const Strategy& strategy) {
  const int64_t seq = strategy.seq_len > 0 ? strategy.seq_len : model.seq_len;
  return as_double(strategy.microbatch_size) * as_double(seq) /
         as_double(strategy.layout.cp);
}

ActivationBytes block_bytes(
    const ModelShape& model, const Strategy& strategy, const Stack& stack,
    bool experts, Recompute recompute) {
  const BlockElements block = elements_of(model, strategy, experts);
  const double element = element_bytes(strategy.precision);
  const double tokens = rank_tokens(model, strategy);
  const double none = kept_without_scores(block, stack, element) +
                      scores_kept(block, stack, element);
  double kept = none;
  if (recompute == Recompute::all) kept = element * block.hidden;
  if (recompute == Recompute::selective) {
    kept = std::min(none, selective_kept(block, stack, element));
  }
  // Gradients: of the residual stream twice, and of the larger of feed-forward
  // and attention.
  const double scores = stack.fused_attention ? 0 : 2 * block.scores;
  const double gradients =
      element *
      (2 * block.hidden + std::max(
                              (block.halves + 1) * block.inner,
                              scores + block.projected + block.attended));
  return {
      .kept = tokens * kept,
      .working = tokens * (none - kept + gradients),
      .output = tokens * element * block.hidden};
}

ActivationBytes head_bytes(
    const ModelShape& model, const Strategy& strategy, const Stack& stack) {
  const TransformerShape& shape = *model.transformer;
  const double tp = as_double(strategy.layout.tp);
  const double tokens = rank_tokens(model, strategy);
  const double element = element_bytes(strategy.precision);
  const double hidden =
      as_double(shape.hidden) / (strategy.sequence_parallel ? tp : 1);
  const double logits = as_double(shape.vocab) / tp;
  return {
      .kept = tokens *
              (2 * element * hidden + stack.memory.logit_kept_bytes * logits),
      .working = tokens * (element * hidden +
                           stack.memory.logit_working_bytes * logits)};
}

ActivationBytes counted_bytes(
    const CountedLayer& layer, const Strategy& strategy, Recompute recompute) {
  const double bytes =
      element_bytes(strategy.precision) * as_double(strategy.microbatch_size);
  const double none = bytes * layer.kept_elements;
  const double output = bytes * layer.output_elements;
  // What backward computes again is what is not of products: about half of it.
  double kept = none;
  if (recompute == Recompute::all) kept = std::min(none, output);
  if (recompute == Recompute::selective) kept = none / 2;
  return {.kept = kept, .working = none - kept + 2 * output, .output = output};
}

}  // namespace echelon
