// A layer comes from one of three sources: a transformer's formulas
// (transformer_work.cpp), operators that were counted one by one, or sums
// alone. Sums become one matmul, whose depth takes up all of the layer's FLOPs,
// and one pass through memory. Gradients of inputs and of weights are separate
// lists, since schedules may run them apart. Where only some layers of a stage
// recompute, a run of equal layers is split in two.
#include "echelon/cost/layer_work.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "echelon/cost/memory_estimate.h"
#include "echelon/cost/strategy.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::cost {
namespace {

Operation products(const CountedLayer& layer, double flops, double samples) {
  Operation operation;
  operation.kind = OperationKind::matrix;
  operation.name = layer.name;
  operation.flops = flops;
  operation.m =
      std::max<int64_t>(1, std::llround(std::max(1.0, layer.rows) * samples));
  operation.n = std::max<int64_t>(1, layer.columns);
  // The depth takes up what other products the layer has beside its largest.
  operation.k = std::max<int64_t>(
      1, std::llround(
             flops / (2 * as_double(operation.m) * as_double(operation.n))));
  return operation;
}

Operation moves(const CountedLayer& layer, double bytes) {
  Operation operation;
  operation.name = layer.name;
  operation.bytes = bytes;
  operation.launches = 3;
  return operation;
}

/// Adds one product and one pass through memory, which stand for all of the
/// layer.
void add_products(
    LayerWork& work, const CountedLayer& layer, double element,
    double samples) {
  const double moved = element * layer.moved_elements * samples;
  if (layer.forward_flops > 0) {
    work.forward.push_back(
        products(layer, layer.forward_flops * samples, samples));
  }
  work.forward.push_back(moves(layer, moved));
  if (layer.backward_flops > 0) {
    // A matmul has two of its size in backward: for its inputs and its weights.
    const double half = layer.backward_flops * samples / 2;
    work.backward_input.push_back(products(layer, half, samples));
    work.backward_weight.push_back(products(layer, half, samples));
  }
  work.backward_input.push_back(moves(layer, 1.5 * moved));
}

/// Attention reads queries, keys and values and writes as much as the queries;
/// its gradients read and write about twice that.
double attention_bytes(const CountedOperator& one, double element) {
  const double heads = as_double(one.count), width = as_double(one.k);
  const double once =
      2 * heads * width * (as_double(one.m) + as_double(one.n)) * element;
  return one.product == cluster::ProductKind::attention ? once : 2 * once;
}

/// An operator of another number of samples than was counted: all of its
/// tensors are taken to grow with them, of products the side that samples are
/// on.
Operation counted_operation(
    const CountedOperator& one, double ratio, double bytes_beside,
    double element) {
  Operation operation;
  operation.name = one.name;
  operation.counted = true;
  operation.launches = one.launches;
  operation.bytes_beside = bytes_beside;
  operation.bytes = one.bytes * ratio;
  if (one.count > 0) {
    operation.count = one.count;
    operation.m = one.m;
    operation.n = one.n;
    operation.k = one.k;
    operation.one_weight = one.one_weight;
    const bool plain = one.product.value_or(cluster::ProductKind::product) ==
                       cluster::ProductKind::product;
    int64_t& side = one.count > 1             ? operation.count
                    : one.for_weight && plain ? operation.k
                                              : operation.m;
    side = std::max<int64_t>(1, std::llround(as_double(side) * ratio));
  }
  if (one.collective) {
    operation.kind = OperationKind::collective;
    operation.collective = *one.collective;
    operation.axis = one.axis;
    return operation;
  }
  if (!one.product) return operation;
  operation.kind = OperationKind::matrix;
  // Of what runs with fp8, only these products have 8 bits.
  operation.wide = one.name != "fp8_mm_";
  operation.product = *one.product;
  operation.flops = as_double(operation.count) *
                    cluster::product_flops(
                        operation.product, as_double(operation.m),
                        as_double(operation.n), as_double(operation.k));
  if (is_attention(operation)) {
    operation.bytes = attention_bytes(one, element) * ratio;
    if (one.causal) operation.flops /= 2;
  }
  return operation;
}

/// What counted operators move for a microbatch.
struct CountedBytes {
  double each = 0;  // on average
  double rank = 0;  // all that one rank computes, with sums of gradients
};

/// Adds the layer as it ran, operator by operator.
void add_operators(
    LayerWork& work, const CountedLayer& layer, const Strategy& strategy,
    const CountedBytes& bytes) {
  const double ratio =
      as_double(strategy.microbatch_size) / as_double(layer.counted_samples);
  const double element = element_bytes(strategy.precision);
  for (const CountedOperator& one : layer.forward) {
    work.forward.push_back(counted_operation(one, ratio, bytes.each, element));
  }
  // The first microbatch has nothing to add its gradients to.
  const auto passes = as_double(strategy.num_microbatches());
  const double adding = (passes - 1) / passes;
  for (const CountedOperator& one : layer.backward) {
    if (one.accumulates && adding == 0) continue;
    Operation operation = counted_operation(
        one, one.accumulates ? 1 : ratio, bytes.each, element);
    if (one.accumulates) {
      operation.times = adding;
      // The sum so far is read and written, a microbatch after it was.
      operation.bytes_since = bytes.rank;
    }
    // The node that adds gradients up is part of the graph whether it adds or
    // keeps the first. Starting it costs no more than starting an operator of
    // forward.
    operation.backward = !one.accumulates;
    (one.for_weight ? work.backward_weight : work.backward_input)
        .push_back(std::move(operation));
  }
}

CountedBytes
bytes_of_operators(const ModelShape& model, const Strategy& strategy) {
  double bytes = 0, operators = 0, sums = 0;
  for (const CountedLayer& layer : model.layers) {
    if (layer.counted_samples == 0) continue;
    const double ratio =
        as_double(strategy.microbatch_size) / as_double(layer.counted_samples);
    for (const auto* pass : {&layer.forward, &layer.backward}) {
      for (const CountedOperator& one : *pass) {
        if (one.accumulates) {
          sums += one.bytes;
          continue;
        }
        if (one.collective) continue;
        ++operators;
        const double count = as_double(one.count);
        const double m = as_double(one.m), n = as_double(one.n);
        const double k = as_double(one.k);
        // A filter sees each pixel several times; images are moved once.
        const double moved =
            one.product.value_or(cluster::ProductKind::product) ==
                    cluster::ProductKind::product
                ? m * n + m * k + n * k
                : 2 * m * n + n * k;
        bytes += ratio * (one.bytes +
                          element_bytes(strategy.precision) * count * moved);
      }
    }
  }
  if (operators == 0) return {};
  return {
      .each = bytes / operators,
      .rank = (bytes + sums) / as_double(strategy.layout.pp)};
}

LayerWork counted_work(
    const CountedLayer& layer, const Strategy& strategy,
    const CountedBytes& bytes) {
  const double samples = as_double(strategy.microbatch_size);
  const double element = element_bytes(strategy.precision);
  LayerWork work;
  work.name = layer.name;
  work.parameters = layer.parameters;
  work.stage = layer.stage;
  if (layer.counted_samples > 0) {
    add_operators(work, layer, strategy, bytes);
  } else {
    add_products(work, layer, element, samples);
  }
  work.output_bytes = element * layer.output_elements * samples;
  if (strategy.recompute == Recompute::all) work.again = work.forward;
  if (strategy.recompute == Recompute::selective) {
    for (const Operation& operation : std::as_const(work.forward)) {
      // Products are kept, so their factors are not rounded again.
      const bool of_product =
          operation.name == "largest_magnitude" || operation.name == "to_fp8";
      if (operation.kind == OperationKind::memory && !of_product) {
        work.again.push_back(operation);
      }
    }
  }
  return work;
}

double flops_of(const LayerWork& layer) {
  double flops = 0;
  for (const Operations* pass :
       {&layer.forward, &layer.backward_input, &layer.backward_weight}) {
    for (const Operation& operation : *pass) flops += operation.flops;
  }
  return flops;
}

bool is_block(const LayerWork& layer) {
  return layer.name == "block" || layer.name == "expert block";
}

void append(
    std::vector<LayerWork>& stage, const LayerWork& layer, int64_t repeat) {
  if (repeat == 0) return;
  LayerWork part = layer;
  part.repeat = repeat;
  stage.push_back(std::move(part));
}

/// Lets only the first `most` layers of a stage recompute.
void limit_recompute(std::vector<LayerWork>& stage, int64_t most) {
  std::vector<LayerWork> limited;
  for (const LayerWork& layer : stage) {
    if (layer.again.empty()) {
      limited.push_back(layer);
      continue;
    }
    const int64_t again = std::min(most, layer.repeat);
    append(limited, layer, again);
    append(limited, layer, layer.repeat - again);
    if (layer.repeat > again) limited.back().again.clear();
    most -= again;
  }
  stage = std::move(limited);
}

}  // namespace

std::vector<LayerWork> layer_work(
    const ModelShape& model, const Strategy& strategy,
    const Framework& framework) {
  std::vector<LayerWork> layers;
  if (model.transformer) {
    layers = transformer_work(model, strategy, framework);
  }
  const CountedBytes bytes = bytes_of_operators(model, strategy);
  for (const CountedLayer& layer : model.layers) {
    layers.push_back(counted_work(layer, strategy, bytes));
  }
  int64_t kind = 0;
  for (LayerWork& layer : layers) layer.kind = kind++;
  return layers;
}

std::vector<std::vector<LayerWork>>
stage_work(const std::vector<LayerWork>& layers, const Strategy& strategy) {
  const int64_t stages = num_stages(strategy);
  std::vector<double> flops;     // of the layers that are spread
  std::vector<int64_t> counted;  // their stages
  int64_t spread = 0;
  bool blocks = false;
  for (const LayerWork& layer : layers) blocks |= is_block(layer);
  for (const LayerWork& layer : layers) {
    if (blocks && !is_block(layer)) continue;
    spread += layer.repeat;
    flops.insert(
        flops.end(), static_cast<size_t>(layer.repeat), flops_of(layer));
    counted.insert(
        counted.end(), static_cast<size_t>(layer.repeat), layer.stage);
  }
  // Embedding and head may be stages of their own.
  if (spread + (blocks ? 2 : 0) < stages) {
    throw ConfigError(format(
        "pp={} with {} each partitions the model into {}, but it has {}; take "
        "fewer",
        strategy.layout.pp,
        echelon::counted(stages_per_rank(strategy), "stage"),
        echelon::counted(stages, "stage"), echelon::counted(spread, "layer")));
  }
  const std::vector<int64_t> counts =
      !strategy.stage_layers.empty() ? strategy.stage_layers
      : blocks                       ? blocks_of_stages(spread, stages)
                                     : layers_of_stages(flops, stages, counted);

  std::vector<std::vector<LayerWork>> partition(static_cast<size_t>(stages));
  size_t stage = 0;
  int64_t room = counts[0];
  for (const LayerWork& layer : layers) {
    if (blocks && !is_block(layer)) {
      // The layers that are no blocks are the embedding and the head.
      append(
          &layer == &layers.front() ? partition.front() : partition.back(),
          layer, 1);
      continue;
    }
    for (int64_t left = layer.repeat; left > 0;) {
      if (room == 0) room = counts[++stage];
      const int64_t here = std::min(left, room);
      append(partition[stage], layer, here);
      left -= here;
      room -= here;
    }
  }
  if (strategy.recompute_layers >= 0) {
    for (auto& one : partition) limit_recompute(one, strategy.recompute_layers);
  }
  return partition;
}

}  // namespace echelon::cost
