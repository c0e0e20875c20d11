// Modules of which a rank holds a shard of some parameters.
//
//   for (auto& [name, shard] : shards_of(network)) …     // by full name
//
// Whatever reads and writes parameters by name (initial values, weights files,
// checkpoints, norms, `verify`) refers to the full tensors; the functions here
// convert between them and shards.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "echelon/architecture/parameter_list.h"
#include "echelon/layout/shard.h"

namespace echelon {

/// The shard of one parameter that a rank of a tensor-parallel group holds.
struct ParameterShard {
  Shard shard;
  /// Backward leaves a partial sum in `grad`: each rank that has the parameter
  /// applies it to other tokens, or for other heads. The caller of backward
  /// sums it over the ranks that share each index
  /// (parallel/tensor/shared_gradients.h).
  bool sum_gradients = false;
  /// The initial value, for initialize_shards.
  InitialValue initial;
};

/// The interface through which shards_of asks each module.
class HasShards {
 public:
  virtual ~HasShards() = default;
  /// By the names that the module itself gave: "weight".
  const std::map<std::string, ParameterShard>& own_shards() const {
    return shards_;
  }

 protected:
  std::map<std::string, ParameterShard> shards_;
};

/// A module that registers parameters together with their shards. A parameter
/// that is registered as usual is the full one on every rank of the group, with
/// the same gradient on each. (A module that derives from one of LibTorch's
/// implements HasShards by itself.)
class ShardedModule : public torch::nn::Module, public HasShards {
 public:
  using torch::nn::Module::Module;

 protected:
  /// Registers a parameter of shard.local_shape(), not initialised.
  torch::Tensor register_shard(const std::string& name, ParameterShard shard);
};

/// The shards of `root` and of all modules below it, by full name. Parameters
/// that are not among them are not sharded.
std::map<std::string, ParameterShard> shards_of(const torch::nn::Module& root);

/// Gives each parameter and buffer that shards_of(module) lists its initial
/// value: bit for bit that of the full tensor, which depends only on `seed` and
/// on prefix + name. A layer that a LayerList builds is initialised so unless
/// its definition says otherwise.
void initialize_shards(
    torch::nn::Module& module, const std::string& prefix, uint64_t seed);

/// Gives every parameter and buffer of `module`, a layer or a whole model, its
/// initial value from `list`; of a sharded one, that of the shard. Throws Error
/// when the module's names or full shapes are not those of `list`.
///
///   prefix  what `list` has before the module's own names: "layer1.0."
void initialize(
    torch::nn::Module& module, std::string_view prefix,
    const std::vector<ParameterInfo>& list, uint64_t seed);

/// The shard of `full` (of shard.shape) that this rank holds: a view where it
/// is one range, else a new tensor.
torch::Tensor slice_of(const torch::Tensor& full, const Shard& shard);

/// Copies the shard `local` to its place in `full`.
void copy_into_full(
    torch::Tensor full, const torch::Tensor& local, const Shard& shard);

}  // namespace echelon
