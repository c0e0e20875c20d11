// What is trained: a model as a list of layers, whole or cut over ranks.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "echelon/architecture/parameter_list.h"
#include "echelon/counting/layer_cost.h"
#include "echelon/data/dataset.h"
#include "echelon/job/job.h"
#include "echelon/layers/layer_list.h"
#include "echelon/parallel/tensor/tensor_parallel.h"

namespace echelon {

/// A list of layers for a rank of a tensor-parallel group; of one rank, the
/// default, the whole layers.
using LayerFactory = std::function<LayerList(const TensorParallel&)>;

/// A model to train: its layers, and every parameter and buffer by name, in the
/// order of a state dict; tied ones once, by the first of their names.
struct ModelSource {
  LayerList layers;  // whole, as one device has them
  LayerFactory cut;  // as ranks that compute each layer together have them
  std::vector<ParameterInfo> parameters;
  SampleSpec sample;    // what it is trained on
  int64_t classes = 0;  // that it tells apart, or words
  /// The other names of tied parameters, and the first one of each.
  std::map<std::string, std::string> first_names;
  /// Parameters without requires_grad: optimizers keep no state of them.
  std::set<std::string> frozen;

  /// The name in `parameters` of the tensor that a part calls `name`.
  const std::string& first_name(const std::string& name) const;

  /// Elements of all parameters, buffers left out.
  int64_t num_parameters() const;
};

/// The model that job.model names.
ModelSource model_source(const Job& job, const SampleSpec& sample);
/// A user's own list, whose first layer takes [batch, *sample.input_shape]
/// (then what else the data has: Batch::more) and whose last returns the
/// scores. Ties that were not declared are found.
///
/// Cut lists have the same layers and names as the whole one; ConfigError when
/// they have not. Nothing is built whole for them: cut parameters have the
/// first values that their shards say (sharded_module.h), in one part or in
/// many.
ModelSource model_source(
    const Job& job, const LayerFactory& layers, const SampleSpec& sample);
/// A list that cannot be cut: ConfigError when it is asked to.
LayerFactory whole_layers(const LayerList& layers);

/// Whether ranks have to ask each other how many units a batch of this data
/// has.
bool counts_units(const Dataset& dataset);

/// Whether the model's layers draw random masks ([model] dropout above 0, and
/// the data is text): then batches have keys.
bool draws_masks(const Job& job, const SampleSpec& sample);

/// Of forward and backward: [precision] compute, or [model] dtype.
torch::Dtype compute_dtype(const Job& job);

/// A batch of so many samples, as the model's first layer takes it in
/// job.layout.
std::vector<TensorSpec>
input_specs(const Job& job, const ModelSource& source, int64_t samples);

/// Floating-point parameters and buffers; Module::to would turn the counters of
/// batches into floating point as well.
void to_dtype(torch::nn::Module& module, torch::Dtype dtype);

/// "float64" -> torch::kFloat64.
torch::Dtype dtype_of(const std::string& name);

}  // namespace echelon
