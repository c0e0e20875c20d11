// One function per model: its layers, in float32 and without initial values.
//
// In a tensor-parallel group, the layers of image networks take and return this
// rank's even shard of the channels. The layers of "mlp" return, in turn, a
// shard of the features and all features. Every rank has the model's input and
// the final scores.
#pragma once

#include <cstdint>
#include <vector>

#include "echelon/architecture/language_model.h"
#include "echelon/architecture/parameter_list.h"
#include "echelon/layers/layer_list.h"
#include "echelon/parallel/tensor/tensor_parallel.h"

namespace echelon::models {

LayerList simple_cnn_layers(
    const std::vector<int64_t>& image, int64_t classes,
    const TensorParallel& parallel);

LayerList mlp_layers(
    int64_t features, const std::vector<int64_t>& hidden, int64_t classes,
    const TensorParallel& parallel);

LayerList resnet_layers(
    const ResnetConfig& config, int64_t channels, int64_t classes,
    const TensorParallel& parallel);

LayerList
gpt_layers(const LanguageModelShape& shape, const TensorParallel& parallel);

LayerList
llama_layers(const LanguageModelShape& shape, const TensorParallel& parallel);

}  // namespace echelon::models
