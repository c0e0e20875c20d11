#include "echelon/train/strategies/counted_shape.h"

#include <algorithm>
#include <set>

#include "echelon/comm/group.h"
#include "echelon/job/pipeline_schedule.h"
#include "echelon/layers/ties.h"
#include "echelon/train/strategies/model_partition.h"

namespace echelon {
namespace {

CountedOperator counted(const OperatorWork& work) {
  return {
      .name = work.name,
      .product = work.product,
      .count = work.count,
      .m = work.m,
      .n = work.n,
      .k = work.k,
      .bytes = work.bytes,
      .for_weight = work.for_weight};
}

double flops_of(const OperatorWork& work) {
  return static_cast<double>(work.count) * static_cast<double>(work.m) *
         static_cast<double>(work.n) * static_cast<double>(work.k);
}

// The largest matmul, and what the other operators move, for one sample.
void summarise(
    CountedLayer& layer, const std::vector<OperatorWork>& forward,
    double element_bytes) {
  const auto samples = static_cast<double>(layer.counted_samples);
  const OperatorWork* largest = nullptr;
  for (const auto& work : forward) {
    if (work.product.empty()) {
      layer.moved_elements += work.bytes / element_bytes / samples;
    } else if (largest == nullptr || flops_of(work) > flops_of(*largest)) {
      largest = &work;
    }
  }
  if (largest == nullptr) return;
  layer.inner = largest->k;
  layer.columns = largest->n;
  layer.rows = static_cast<double>(largest->m) *
               static_cast<double>(largest->count) / samples;
}

CountedLayer layer_of(
    const LayerCost& cost, const LayerOperators& operators, int64_t samples,
    double element_bytes) {
  const auto per_sample = 1 / static_cast<double>(samples);
  const auto elements = [&](int64_t bytes) {
    return static_cast<double>(bytes) / element_bytes * per_sample;
  };
  CountedLayer layer{
      .name = cost.name,
      .forward_flops = cost.forward_flops * per_sample,
      .backward_flops = cost.backward_flops * per_sample,
      .parameters = static_cast<double>(cost.parameters),
      .kept_elements = elements(cost.activation_bytes),
      .output_elements = elements(cost.output_bytes),
      .counted_samples = samples};
  summarise(layer, operators.forward, element_bytes);
  for (const auto& work : operators.forward) {
    layer.forward.push_back(counted(work));
  }
  for (const auto& work : operators.backward) {
    layer.backward.push_back(counted(work));
  }
  for (const auto& one : cost.parameter_specs) {
    if (!one.requires_grad) continue;
    // Two are read and one is written.
    const auto numel =
        static_cast<double>(c10::multiply_integers(one.tensor.shape));
    layer.backward.push_back(
        {.name = "add",
         .bytes = 3 * numel * element_bytes,
         .for_weight = true,
         .accumulates = true});
  }
  return layer;
}

ModelShape shape_of(
    const CountedOperators& all, int64_t samples, torch::Dtype dtype,
    const std::string& name) {
  ModelShape model{.name = name};
  const auto element_bytes = static_cast<double>(c10::elementSize(dtype));
  for (size_t i = 0; i < all.costs.size(); ++i) {
    model.layers.push_back(
        layer_of(all.costs[i], all.layers[i], samples, element_bytes));
  }
  return model;
}

// The trainer's partition; the loss is on the last stage.
void set_stages(
    ModelShape& model, const Job& job, std::vector<LayerCost> costs) {
  costs.pop_back();
  const auto boundaries = stage_boundaries(job, pipeline_schedule(job), costs);
  for (size_t stage = 0; stage + 1 < boundaries.size(); ++stage) {
    for (size_t layer = boundaries[stage]; layer < boundaries[stage + 1];
         ++layer) {
      model.layers[layer].stage = static_cast<int64_t>(stage);
    }
  }
  model.layers.back().stage = model.layers[costs.size() - 1].stage;
}

// A stage counts a tied parameter once, for the first of its layers there.
void join_ties(
    ModelShape& model, const LayerList& layers,
    const std::vector<LayerCost>& costs) {
  for (const auto& group : tied_groups(layers)) {
    std::set<int64_t> stages;
    for (size_t i = 0; i < group.layers.size(); ++i) {
      CountedLayer& layer = model.layers[group.layers[i]];
      if (stages.insert(layer.stage).second) continue;
      for (const auto& one : costs[group.layers[i]].parameter_specs) {
        if (layer.name + "." + one.name != group.names[i]) continue;
        layer.parameters -=
            static_cast<double>(c10::multiply_integers(one.tensor.shape));
      }
    }
  }
}

}  // namespace

ModelShape counted_shape(const Job& job, const ModelSource& source) {
  const TensorParallel parallel = silent_tensor_parallel(job);
  const int64_t samples = largest_microbatch(job);
  const auto layers =
      with_loss(source.sharded(parallel), source, parallel, samples);
  const auto dtype = compute_dtype(job);
  const auto counted = count_operators(
      layers, input_specs(job, source, samples), {.dtype = dtype});
  ModelShape model = shape_of(counted, samples, dtype, job.model.name);
  if (!source.sample.target_shape.empty()) {
    model.seq_len = source.sample.target_shape.front();
  }
  if (job.layout.pp > 1) set_stages(model, job, counted.costs);
  join_ties(model, layers, counted.costs);
  return model;
}

ModelShape counted_shape(const Job& job) {
  const TrainingData data = open_data(job.data, job.train.seed);
  return counted_shape(job, model_source(job, data.train->spec()));
}

ModelShape counted_shape(
    const LayerList& layers, const std::vector<TensorSpec>& inputs,
    int64_t samples, const std::string& name) {
  return shape_of(
      count_operators(layers, inputs), samples, inputs.front().dtype, name);
}

}  // namespace echelon
