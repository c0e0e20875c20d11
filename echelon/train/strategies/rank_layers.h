// The slices of a job's model that a rank has, built layer by layer. Each layer
// gets its values, dtype and device, is sharded over dp_shard and wrapped as
// [memory] says before the next one is built, so that no rank ever holds more
// than its shards and one full layer.
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "echelon/layers/network.h"
#include "echelon/memory/layer_memory.h"
#include "echelon/models/mixture.h"
#include "echelon/models/weights.h"
#include "echelon/optim/optimizer.h"
#include "echelon/parallel/data/sync_batch_norm.h"
#include "echelon/parallel/shard/sharded_units.h"
#include "echelon/parallel/tensor/shared_gradients.h"
#include "echelon/train/strategies/parallel_model.h"

namespace echelon {

struct RankLayersOptions {
  std::vector<std::pair<size_t, size_t>> slices;  // [begin, end), ascending
  /// The most microbatches that wait for their backward at once.
  int64_t in_flight = 1;
  /// Tied parameters of different slices.
  std::vector<Tie> ties;
  /// Parameters stay unsharded until the end of the step.
  bool unshard_once = false;
  /// Wraps a layer's own forward, inside of all other wrappers, where the
  /// parameters are unsharded. May be null.
  std::function<LayerForward(const Layer& layer, size_t index)> innermost;
};

/// Activation checkpointing and offloading for the layers of `slices`; none
/// when [memory] asks for neither.
std::optional<LayerMemory> layer_memory(
    const Job& job, const ModelSource& source,
    const std::vector<std::pair<size_t, size_t>>& slices, int64_t in_flight);

/// Every rank of the world makes one (only the ranks of place.groups when the
/// layout is one device).
class RankLayers {
 public:
  /// `layers` are sharded for this rank of its tensor-parallel group.
  RankLayers(
      const Job& job, const ModelPlace& place, const LayerList& layers,
      RankLayersOptions options);
  RankLayers(const RankLayers&) = delete;
  RankLayers& operator=(const RankLayers&) = delete;

  /// By slice.
  const std::vector<std::shared_ptr<Network>>& networks() const {
    return networks_;
  }
  void train(bool on);

  /// Null unless shards_parameters(job) holds.
  ShardedUnits* units() { return units_.get(); }
  /// The units of a slice, for BackwardPass.
  const std::vector<size_t>& units_of(size_t slice) const {
    return slice_units_.at(slice);
  }

  /// With units(), call it before the first forward of a step: broadcasts the
  /// buffers of the first data-parallel rank.
  void sync_buffers();
  /// Without units(), call it after the last backward: sums gradients over
  /// tensor-parallel ranks (shared_gradients.h). With units() that happens
  /// before each unit is reduced.
  void finish_shared();
  /// Call finish() at the end of a step, after the last backward.
  models::RouterSteps& routers() { return *routers_; }
  const models::RouterSteps& routers() const { return *routers_; }

  std::vector<LocalParameter> parameters() const;
  std::vector<LocalParameter> buffers() const;
  std::vector<ParameterGroup> optimizer_groups(double weight_decay) const;
  void after_update(bool updated);
  void before_load();
  void after_load();

 private:
  void make_units(ShardedUnitsOptions options);
  void build(
      const ModelOptions& model, uint64_t seed,
      const RankLayersOptions& options);
  void prepare(NewLayer& layer, size_t slice, const RankLayersOptions& options);
  void shard(NewLayer& layer, size_t slice);

  torch::Dtype dtype_ = torch::kFloat32;  // of the master parameters
  torch::Device device_;
  Group data_;
  Group shard_;
  Group replicate_;
  TensorParallel tensor_;
  LayerList layers_;
  std::optional<LayerMemory> memory_;  // when [memory] asks for something
  size_t built_ = 0;                   // layers
  std::unique_ptr<ShardedUnits> units_;
  std::unique_ptr<LayerWeights> weights_;  // while layers are built
  std::vector<std::shared_ptr<Network>> networks_;
  std::vector<std::vector<size_t>> slice_units_;
  /// By slice and layer: the units that its forward unshards.
  std::vector<std::vector<std::vector<size_t>>> layer_units_;
  std::vector<SharedGradients> shared_;
  std::optional<models::RouterSteps> routers_;
  std::vector<ConvertedBatchNorms> converted_;
  std::map<std::string, ParameterShard> shards_;
};

}  // namespace echelon
