// Counts the tensors that autograd keeps of a block, in elements of one token,
// then multiplies by tokens and bytes (Korthikanti et al., 2022,
// arXiv:2205.05198, with the fusions of each framework). `kept` waits from
// forward to backward. `working` is there only while a layer runs backward: the
// tensors that it recomputes, and its gradients.
#include "echelon/cost/memory_estimate.h"

#include <algorithm>
#include <string>

#include "echelon/cost/strategy.h"

namespace echelon::cost {
namespace {

// Elements of one token in the tensors of one block on one rank. Those marked
// "tp" are sharded by tp, the others by sequence parallelism alone.
struct BlockElements {
  double hidden = 0;      // one tensor of the residual stream
  double projected = 0;   // tp: queries, keys and values for attention
  double compressed = 0;  // their latent form
  double attended = 0;    // tp: attention's output
  double scores = 0;      // tp: of one token with all others
  double inner = 0;       // tp: feed-forward after its first matmul, one half
  double halves = 1;      // 2: gated
  double gathered = 0;    // tokens as dispatched to experts
};

// `busiest`: tokens of the busiest rank of experts over the mean.
double feed_forward_width(
    const TransformerShape& shape, bool experts, double busiest) {
  if (!experts) return as_double(shape.ffn_size());
  return busiest *
             as_double(shape.experts.experts_per_token * shape.experts.ffn) +
         as_double(shape.experts.shared_ffn);
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
  const double seq = as_double(strategy.seq_len_or(model.seq_len));
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
  const double busiest = model.expert_load.of_busiest_rank(strategy.layout.ep);
  block.inner = feed_forward_width(shape, experts, busiest) / tp;
  block.halves = shape.gated ? 2 : 1;
  if (experts) {
    // Dispatched to the experts, and returned before the weighted sum.
    block.gathered =
        2 * busiest * as_double(shape.experts.experts_per_token) * block.hidden;
  }
  return block;
}

// Elements that autograd keeps in the middle of the feed-forward.
double inner_kept(const BlockElements& block, const Framework& framework) {
  return block.inner * (block.halves == 2 ? framework.memory.gated_kept : 2);
}

// Inputs and outputs of two norms, attention and its matmuls, masks.
double kept_without_scores(
    const BlockElements& block, const Framework& framework, double element) {
  double bytes = element * (4 * block.hidden + block.compressed +
                            block.projected + block.attended +
                            inner_kept(block, framework) + block.gathered);
  if (framework.dropout) bytes += 2 * block.hidden;  // masks, of a byte
  return bytes;
}

// The softmax's result, with dropout also its mask and its result; the fused
// kernel keeps one number a row.
double scores_kept(
    const BlockElements& block, const Framework& framework, double element) {
  if (framework.fused_attention) return 0;
  return block.scores * (framework.dropout ? 2 * element + 1 : element);
}

double selective_kept(
    const BlockElements& block, const Framework& framework, double element) {
  switch (framework.memory.selective) {
    case SelectiveWay::attention_scores:
      return kept_without_scores(block, framework, element);
    case SelectiveWay::keeps_products:
      return element * (3 * block.hidden + block.compressed + block.projected +
                        block.attended + block.halves * block.inner +
                        block.gathered) +
             scores_kept(block, framework, element) / 2;
    case SelectiveWay::keeps_half:
      break;
  }
  // The first, third, fifth and seventh of seven matmuls.
  return element * (2 * block.hidden + block.projected * 0.8 + block.attended +
                    block.inner + block.gathered);
}

}  // namespace

double element_bytes(cluster::Precision precision) {
  switch (precision) {
    case cluster::Precision::fp64:
      return 8;
    case cluster::Precision::fp32:
    case cluster::Precision::tf32:
      return 4;
    default:
      return 2;  // fp8 and fp4 are for matmuls alone
  }
}

double reduced_bytes(const Strategy& strategy, const Framework& framework) {
  if (strategy.reduce == ReduceDtype::float32) return 4;
  if (strategy.reduce == ReduceDtype::bf16) return 2;
  return framework.gradient_bytes > 0 ? framework.gradient_bytes
                                      : element_bytes(strategy.precision);
}

double rank_tokens(const ModelShape& model, const Strategy& strategy) {
  const int64_t seq = strategy.seq_len_or(model.seq_len);
  return as_double(strategy.microbatch_size) * as_double(seq) /
         as_double(strategy.layout.cp);
}

namespace {

// What attention over cut sequences holds while a layer runs backward, beside
// its inputs: keys and values of other ranks and the sums of their gradients,
// or heads and tokens in the place of others; and scores, where no fused kernel
// masks them.
double cut_attention_bytes(
    const BlockElements& block, const Strategy& strategy,
    const Framework& framework, double tokens) {
  const double cp = as_double(strategy.layout.cp);
  if (cp == 1 || !framework.context_ways) return 0;
  const double element = element_bytes(strategy.precision);
  const double sum = std::max(4.0, element);
  const double keys_values = block.projected - block.attended;
  const double together =
      as_double(head_ranks(strategy.context, strategy.layout.cp));
  double bytes = 0;
  if (strategy.context.way == ContextWay::all_gather) {
    bytes = cp * keys_values * (element + sum);
  } else if (together < cp) {
    bytes = keys_values * (3 * element + 3 * sum);
  }
  if (together > 1) bytes += 2 * element * (block.projected + block.attended);
  constexpr double kScores = 1 << 22;  // at a time: block_attention.cpp
  return tokens * bytes + (strategy.masks_attention ? 4 * sum * kScores : 0);
}

}  // namespace

ActivationBytes block_bytes(
    const ModelShape& model, const Strategy& strategy,
    const Framework& framework, bool experts, Recompute recompute) {
  const BlockElements block = elements_of(model, strategy, experts);
  const double element = element_bytes(strategy.precision);
  const double tokens = rank_tokens(model, strategy);
  const double none = kept_without_scores(block, framework, element) +
                      scores_kept(block, framework, element);
  double kept = none;
  if (recompute == Recompute::all) kept = element * block.hidden;
  if (recompute == Recompute::selective) {
    kept = std::min(none, selective_kept(block, framework, element));
  }
  // Gradients of the residual stream twice, and of feed-forward or attention,
  // whichever is larger.
  const double scores = framework.fused_attention ? 0 : 2 * block.scores;
  const double gradients =
      element *
      (2 * block.hidden + std::max(
                              (block.halves + 1) * block.inner,
                              scores + block.projected + block.attended));
  return {
      .kept = tokens * kept,
      .working = tokens * (none - kept + gradients) +
                 cut_attention_bytes(block, strategy, framework, tokens),
      .output = tokens * element * block.hidden};
}

ActivationBytes head_bytes(
    const ModelShape& model, const Strategy& strategy,
    const Framework& framework) {
  const TransformerShape& shape = *model.transformer;
  const double tp = as_double(strategy.layout.tp);
  const double tokens = rank_tokens(model, strategy);
  const double element = element_bytes(strategy.precision);
  const double hidden =
      as_double(shape.hidden) / (strategy.sequence_parallel ? tp : 1);
  const double logits = as_double(shape.vocab) / tp;
  return {
      .kept = tokens *
              (2 * element * hidden +
               std::max(element, framework.memory.logit_kept_bytes) * logits),
      .working =
          tokens *
          (element * hidden +
           std::max(element, framework.memory.logit_working_bytes) * logits)};
}

ActivationBytes counted_bytes(
    const CountedLayer& layer, const Strategy& strategy, Recompute recompute) {
  const double bytes =
      element_bytes(strategy.precision) * as_double(strategy.microbatch_size);
  const double none = bytes * layer.kept_elements;
  const double output = bytes * layer.output_elements;
  // Selective recompute drops everything but the matmuls' inputs: about half.
  double kept = none;
  if (recompute == Recompute::all) kept = std::min(none, output);
  if (recompute == Recompute::selective) kept = none / 2;
  return {.kept = kept, .working = none - kept + 2 * output, .output = output};
}

namespace {

std::vector<ActivationBytes> transformer_activations(
    const ModelShape& model, const Strategy& strategy,
    const Framework& framework) {
  const TransformerShape& shape = *model.transformer;
  const int64_t stages = num_stages(strategy);
  const auto of = [&](bool experts, Recompute recompute) {
    return block_bytes(model, strategy, framework, experts, recompute);
  };
  const bool mixture = shape.experts.experts > 0;
  const ActivationBytes again[2] = {
      of(false, strategy.recompute), of(mixture, strategy.recompute)};
  const ActivationBytes keeps[2] = {
      of(false, Recompute::none), of(mixture, Recompute::none)};
  std::vector<ActivationBytes> parts;
  int64_t layer = 0;
  for (const int64_t blocks : stage_layers(model, strategy)) {
    ActivationBytes part;
    for (int64_t i = 0; i < blocks; ++i, ++layer) {
      const bool recomputed =
          strategy.recompute_layers < 0 || i < strategy.recompute_layers;
      const ActivationBytes& block =
          (recomputed ? again : keeps)[shape.has_experts(layer)];
      part.kept += block.kept;
      part.working = std::max(part.working, block.working);
      part.output = block.output;
    }
    parts.push_back(part);
  }
  // The last stage's backward follows its forward at once, so it holds the loss
  // of one microbatch at a time, and none while blocks compute; unless all
  // forwards come first.
  const ActivationBytes head = head_bytes(model, strategy, framework);
  const bool waits = stages > 1 && forwards_first(strategy.schedule);
  if (waits) parts.back().kept += head.kept;
  parts.back().working =
      std::max(parts.back().working, head.working + (waits ? 0 : head.kept));
  return parts;
}

std::vector<ActivationBytes>
counted_activations(const ModelShape& model, const Strategy& strategy) {
  std::vector<ActivationBytes> parts;
  size_t layer = 0;
  for (const int64_t layers : stage_layers(model, strategy)) {
    ActivationBytes part;
    for (int64_t i = 0; i < layers; ++i, ++layer) {
      const ActivationBytes one =
          counted_bytes(model.layers[layer], strategy, strategy.recompute);
      part.kept += one.kept;
      part.working = std::max(part.working, one.working);
      part.output = one.output;
    }
    parts.push_back(part);
  }
  return parts;
}

}  // namespace

std::vector<ActivationBytes> stage_activations(
    const ModelShape& model, const Strategy& strategy,
    const Framework& framework) {
  return model.transformer ? transformer_activations(model, strategy, framework)
                           : counted_activations(model, strategy);
}

}  // namespace echelon::cost
