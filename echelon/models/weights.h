// A model's weights in a safetensors file or a Hugging Face folder, under the
// names of a state dict, as Python's safetensors package reads and writes them
// for the same model.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/layers/network.h"

namespace echelon {

/// Every parameter and buffer by name, in the order of Python's state_dict: a
/// module's parameters, then its buffers, then its children. They are the
/// module's own tensors, not copies. Undefined ones are left out.
std::vector<std::pair<std::string, torch::Tensor>>
state_dict(const torch::nn::Module& module);

/// Copies the tensors of a file or folder (weights_source.h) into the module,
/// on any device. Only this rank's shard of a sharded parameter
/// (sharded_module.h) is read. The rules are those of check_weights.h. Throws
/// DataError that lists every tensor that does not fit, and then changes
/// nothing; CheckpointError when the file is missing or malformed.
void load_weights(torch::nn::Module& module, const std::string& path);

/// The same for a network that may be a slice: reads and checks only the
/// tensors of its layers, and skips those of the list's other layers. A tied
/// parameter may be in the file under any of its names, or under several if
/// they are equal there.
void load_weights(Network& network, const std::string& path);

/// Copies the adapters (architecture/trained_parameters.h) alone, from a file
/// or checkpoint that need not have the model's other tensors. Throws DataError
/// that lists every adapter that is missing, unknown or of another shape.
void load_adapters(Network& network, const std::string& path);

/// Loads a file's weights layer by layer as the layers of a list are built:
/// each is filled before the next one exists.
///
///   LayerWeights weights(list, path);
///   build_network(list, begin, end, std::nullopt, [&](NewLayer& layer) {
///     weights.load(layer.index, layer.layer.module.get());
///   });
class LayerWeights {
 public:
  /// Throws CheckpointError when the file is missing or malformed.
  LayerWeights(const LayerList& list, const std::string& path);
  ~LayerWeights();
  LayerWeights(const LayerWeights&) = delete;
  LayerWeights& operator=(const LayerWeights&) = delete;

  /// Fills `module`, that of list[index] (null: it has none), by the rules of
  /// load_weights. Throws DataError that lists every tensor of this layer that
  /// does not fit, and every tensor of the file that no layer has, and then
  /// changes nothing.
  void load(size_t index, torch::nn::Module* module) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The tensors that a slice contributes to a file of the whole list: its
/// state_dict without the parameters that are tied to one of an earlier slice.
std::vector<std::pair<std::string, torch::Tensor>>
owned_tensors(const Network& network);

/// Writes state_dict(module), atomically. Throws CheckpointError when the disk
/// does not take it.
void save_weights(
    const torch::nn::Module& module, const std::string& path,
    const safetensors::Metadata& metadata = {{"format", "pt"}});

}  // namespace echelon
