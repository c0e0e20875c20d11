#include "echelon/cost/layer_builder.h"

#include <algorithm>
#include <utility>

#include "echelon/cost/memory_estimate.h"

namespace echelon::cost {
namespace {

Operation matrix(
    const std::string& name, int64_t count, int64_t m, int64_t n, int64_t k) {
  Operation operation;
  operation.kind = OperationKind::matrix;
  operation.name = name;
  operation.count = count;
  operation.m = m;
  operation.n = n;
  operation.k = k;
  operation.flops =
      2.0 * as_double(count) * as_double(m) * as_double(n) * as_double(k);
  return operation;
}

int64_t divided(int64_t whole, int64_t by) {
  return std::max<int64_t>(1, (whole + by - 1) / by);
}

/// A matmul as `chunks` of `batches`, which multiply one weight; of 8 bits,
/// batches run one by one.
Operation
in_chunks(Operation whole, int64_t chunks, int64_t batches, bool together) {
  if (chunks == 1) return whole;
  whole.m = divided(whole.m, chunks * batches);
  whole.count = together ? batches : 1;
  whole.one_weight = together;
  whole.times = as_double(together ? chunks : chunks * batches);
  return whole;
}

Operation memory(const std::string& name, double bytes, int64_t launches) {
  Operation operation;
  operation.name = name;
  operation.bytes = bytes;
  operation.launches = launches;
  return operation;
}

}  // namespace

LayerBuilder::LayerBuilder(
    std::string name, const Strategy& strategy, const Framework& framework)
    : strategy_(strategy),
      framework_(framework),
      element_bytes_(cost::element_bytes(strategy.precision)) {
  work_.name = std::move(name);
}

void LayerBuilder::linear(
    const std::string& name, int64_t rows, int64_t columns, int64_t inner,
    bool bias, int64_t count, bool expert, const ProductChunks& chunks) {
  quantise(
      name, as_double(rows * count), as_double(inner), as_double(columns),
      count);
  work_.forward.push_back(in_chunks(
      matrix(name, count, rows, columns, inner), chunks.forward, chunks.batches,
      !in_8_bits()));
  work_.backward_input.push_back(in_chunks(
      matrix(name, count, rows, inner, columns), chunks.backward,
      chunks.batches, !in_8_bits()));
  work_.backward_weight.push_back(matrix(name, count, inner, columns, rows));
  if (expert) work_.backward_weight.back().share = framework_.expert_share;
  const double weights =
      as_double(count) * as_double(inner) * as_double(columns);
  const double biases = bias ? as_double(count) * as_double(columns) : 0;
  if (bias) {
    work_.backward_weight.push_back(memory(
        name + " bias",
        element_bytes_ * as_double(rows * count) * as_double(columns), 1));
  }
  work_.backward_weight.push_back(memory(
      name + " accumulate", framework_.accumulate_bytes * (weights + biases),
      bias ? 2 : 1));
  if (expert) {
    // Each expert's product is started by itself.
    work_.forward.back().launches = count;
    work_.backward_input.back().launches = 2 * count;
    work_.forward.back().share = framework_.expert_share;
    work_.backward_input.back().share = framework_.expert_share;
  }
  work_.parameters += weights + biases;
  if (expert) work_.expert_parameters += weights + biases;
}

/// Products of fp8 and fp4: 16 bits of every input are read and 8 written
/// twice, once for each direction that products read it in; a sum of its
/// magnitudes comes first where the scale is of the tensor as it is.
void LayerBuilder::quantise(
    const std::string& name, double rows, double inner, double columns,
    int64_t tensors) {
  if (!in_8_bits()) return;
  const double bytes = framework_.quantise_bytes;
  const double weights = as_double(tensors) * inner * columns;
  work_.forward.push_back(
      memory(name + " to 8 bit", bytes * (rows * inner + weights), 2));
  work_.backward_input.push_back(
      memory(name + " to 8 bit", bytes * rows * columns, 1));
}

void LayerBuilder::product(
    const std::string& name, int64_t count, int64_t m, int64_t n, int64_t k) {
  work_.forward.push_back(matrix(name, count, m, n, k));
  work_.backward_input.push_back(matrix(name, count, m, k, n));
  work_.backward_input.push_back(matrix(name, count, k, n, m));
}

void LayerBuilder::fused_attention(double flops, double elements) {
  Operation operation;
  operation.kind = OperationKind::attention;
  operation.name = "attention";
  operation.flops = flops;
  operation.bytes = element_bytes_ * elements;
  work_.forward.push_back(operation);
  // Scores are computed again: five products for two.
  operation.backward = true;
  operation.flops = 2.5 * flops;
  operation.bytes *= 2;
  operation.launches = 3;
  work_.backward_input.push_back(operation);
}

void LayerBuilder::stream(
    const std::string& name, double elements, double forward_moves,
    double backward_moves, int64_t forward_launches,
    int64_t backward_launches) {
  work_.forward.push_back(memory(
      name, element_bytes_ * elements * forward_moves, forward_launches));
  if (backward_moves > 0) {
    work_.backward_input.push_back(memory(
        name, element_bytes_ * elements * backward_moves, backward_launches));
  }
}

void LayerBuilder::copy(
    const std::string& name, double elements, bool forward) {
  (forward ? work_.forward : work_.backward_input)
      .push_back(memory(name, 4 * element_bytes_ * elements, 3));
}

void LayerBuilder::reorder(
    const std::string& name, double elements, int64_t launches) {
  work_.backward_weight.push_back(
      memory(name, 2 * element_bytes_ * elements, launches));
}

void LayerBuilder::wait_for_host(
    double forward_seconds, double backward_seconds) {
  work_.forward.back().host_seconds = forward_seconds;
  work_.backward_input.back().host_seconds = backward_seconds;
}

void LayerBuilder::parameters(double elements, int64_t tensors) {
  work_.parameters += elements;
  work_.backward_weight.push_back(
      memory("accumulate", framework_.accumulate_bytes * elements, tensors));
}

void LayerBuilder::collective(
    const std::string& name, Axis axis, CollectiveKind kind, double bytes,
    double hidden, bool forward) {
  collective(
      name,
      {.bytes = bytes, .collective = kind, .axis = axis, .hideable = hidden},
      forward);
}

void LayerBuilder::collective(
    const std::string& name, Operation operation, bool forward) {
  if (strategy_.layout.degree(operation.axis) == 1) return;
  operation.kind = OperationKind::collective;
  operation.name = name;
  (forward ? work_.forward : work_.backward_input).push_back(operation);
}

void LayerBuilder::collective_beside(
    const std::string& name, CollectiveKind kind, double bytes,
    const Beside& product, bool forward) {
  Operation operation{
      .bytes = bytes, .collective = kind, .axis = Axis::tp, .hideable = 0};
  if (product.chunks > 0) {
    operation.bytes = bytes / as_double(product.chunks);
    collective(name, operation, forward);
    if (product.chunks == 1) return;
    operation.times = as_double(product.chunks - 1);
  }
  const int64_t chunks = std::max<int64_t>(1, product.chunks);
  operation.m = divided(product.m, chunks * product.batches);
  operation.n = product.n;
  operation.k = product.k;
  operation.count = product.batches;
  operation.one_weight = true;
  collective(name, operation, forward);
}

LayerWork LayerBuilder::finish(double output_elements) {
  work_.output_bytes = element_bytes_ * output_elements;
  for (auto* pass :
       {&work_.forward, &work_.backward_input, &work_.backward_weight}) {
    for (Operation& operation : pass->change()) operation.wide = wide_;
  }
  if (strategy_.recompute == Recompute::all) {
    work_.again = work_.forward;
  } else if (strategy_.recompute == Recompute::selective) {
    for (size_t at = 0; at < work_.forward.size(); ++at) {
      const bool chosen = framework_.fused_attention
                              ? work_.forward[at].kind == OperationKind::memory
                              : at >= selective_begin_ && at < selective_end_;
      if (chosen) work_.again.push_back(work_.forward[at]);
    }
  }
  return std::move(work_);
}

}  // namespace echelon::cost
