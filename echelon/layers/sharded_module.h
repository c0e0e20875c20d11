// Modules of which a rank holds a part: which part of each parameter that is.
//
//   for (auto& [name, shard] : shards_of(network)) …     // by full name
//
// What reads and writes parameters by name (first values, weights files,
// checkpoints, norms, `verify`) goes by the whole tensors; these functions cut
// them and put them together.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "echelon/architecture/initial_value.h"
#include "echelon/layout/shard.h"

namespace echelon {

/// What a rank of a tensor-parallel group knows of one of its parameters.
struct ParameterShard {
  Shard shard;
  /// What backward leaves in `grad` is this rank's part of a sum: the parameter
  /// is applied to other tokens, or for other heads, on each rank that has it.
  /// Whoever drives backward sums it over the ranks that share each index
  /// (parallel/tensor/shared_gradients.h).
  bool sum_gradients = false;
  /// What initialize_shards gives it.
  InitialValue initial;
};

/// What shards_of asks each module for.
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

/// A module that registers its cut parameters with the part that is here.
/// Parameters that are registered as usual are whole on every rank of the
/// group, with the same gradient on each. (A module that derives from one of
/// LibTorch's is a HasShards by itself.)
class ShardedModule : public torch::nn::Module, public HasShards {
 public:
  using torch::nn::Module::Module;

 protected:
  /// Registers a parameter of shard.local_shape(), not initialised.
  torch::Tensor register_shard(const std::string& name, ParameterShard shard);
  /// The same for a buffer (running statistics of cut channels), zeros.
  torch::Tensor
  register_buffer_shard(const std::string& name, ParameterShard shard);
};

/// The shards of `root` and of all modules below it, by full name. Parameters
/// that are not among them are whole.
std::map<std::string, ParameterShard> shards_of(const torch::nn::Module& root);

/// Gives each parameter and buffer that shards_of(module) lists its first
/// value, bit for bit that of the whole one, which depends on `seed` and on
/// prefix + name alone. A layer that a LayerList builds gets its first values
/// so unless its definition says otherwise.
void initialize_shards(
    torch::nn::Module& module, const std::string& prefix, uint64_t seed);

/// What of `whole` (of shard.shape) is here: a new tensor, or a view where the
/// part is one range.
torch::Tensor slice_of(const torch::Tensor& whole, const Shard& shard);

/// Copies the part `local` to its place in `whole`.
void copy_to_whole(
    torch::Tensor whole, const torch::Tensor& local, const Shard& shard);

/// Views of what `shard` owns of `local`: together, over all ranks, they hold
/// each element of the whole once.
std::vector<torch::Tensor>
owned_parts(const torch::Tensor& local, const Shard& shard);

}  // namespace echelon
