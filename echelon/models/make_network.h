// The models that come with Echelon, by name.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "echelon/layers/layer_list.h"
#include "echelon/layers/network.h"
#include "echelon/options/model.h"
#include "echelon/parallel/tensor/tensor_parallel.h"

namespace echelon {

/// A model as a list of layers, in options.dtype. Their initial values are
/// those of the model's parameter list, by seed and name (sharded_module.h).
///
///   input_shape  one sample, without the batch: channels, height, width; for
///                "mlp" any shape
///   classes      outputs of the last layer
///   its layers   take and return one tensor each: [batch, *input_shape] ->
///                [batch, classes], unnormalised scores (logits)
///
/// simple_cnn  two 3x3 convolutions of 16 and 32 channels, each with ReLU and
///             2x2 max-pooling, then one linear layer: conv1 conv2 fc
/// mlp         linear layers with ReLU between them: fc1 fc2 …
/// gpt*        language models: [batch, sequence] token ids (int64), then the
/// llama* …    tensors of Batch::more (documents, keys) as members of the tuple
///             -> [batch, sequence, vocabulary] logits; in a tensor-parallel
///             group this rank's shard of the vocabulary (even_range). In
///             training, mixtures whose losses count give [batch] losses too.
///             `classes` is the vocabulary size, input_shape {sequence}. Names
///             are those of Hugging Face.
/// resnetN     torchvision's architecture and names: He et al., 2015,
///             arXiv:1512.03385, with the stride of a bottleneck in its 3x3
///             convolution: conv1 bn1 layer1.0 layer1.1 … fc
///
/// Throws ConfigError as list_parameters does. Nothing is built yet.
///
/// `parallel`: the ranks that compute each layer together. Layers then hold
/// this rank's shard of their parameters (sharded_module.h), and every rank of
/// the group runs them with the same inputs.
LayerList model_layers(
    const ModelOptions& options, const std::vector<int64_t>& input_shape,
    int64_t classes, const TensorParallel& parallel = {});

/// The network of all these layers, built on the CPU. Weights from a file are
/// loaded afterwards: weights.h.
std::shared_ptr<Network> make_network(
    const ModelOptions& options, const std::vector<int64_t>& input_shape,
    int64_t classes, uint64_t seed);

}  // namespace echelon
