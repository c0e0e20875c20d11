// What a rank saves of its training, and filling it from a checkpoint of any layout.
#pragma once

#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "echelon/checkpoint/reader.h"
#include "echelon/comm/mesh_groups.h"
#include "echelon/train/step.h"

namespace echelon {

/// One tensor of a rank, and where its elements belong in the whole one.
struct StatePart {
  std::string name;            // as in a manifest
  SavedKind kind = SavedKind::parameter;
  std::vector<int64_t> shape;  // of the whole tensor
  torch::Tensor tensor;        // the live one; boxes' strides are of its row-major
                               // elements
  std::vector<PlacedBox> boxes;
};

/// Everything that the run's further course depends on, of this rank.
///
///   parts_to_save  each element of the model on one rank of the world, as evenly
///                  shared as can be: copies share the work
///   parts_to_load  all that this rank has
///
/// Parameters (master copies), buffers, the optimizer's state ("PARAMETER/exp_avg",
/// "…/step" a scalar for each parameter), by the first name of tied ones; the random
/// state of this rank ("random/RANK").
std::vector<StatePart> parts_to_save(
    const TrainingState& state,
    const ModelSource& source,
    World& world,
    const MeshGroups& groups);
std::vector<StatePart> parts_to_load(
    const TrainingState& state,
    const ModelSource& source,
    World& world,
    const MeshGroups& groups);

/// Host copies of what is to be written; memory is used again by the next one.
class StateSnapshot {
 public:
  /// Copies; pinned memory where the parts are on a GPU. On return training may go
  /// on.
  void take(const std::vector<StatePart>& parts);
  /// Of the last take(); they live until the next.
  const std::vector<SliceBytes>& slices() const { return slices_; }
  int64_t bytes() const;

 private:
  torch::Tensor memory_;  // bytes
  std::vector<SliceBytes> slices_;
};

/// Compares names, kinds, shapes and dtypes of the model with a manifest's. Throws
/// CheckpointError that lists all that are missing, unexpected or of another shape;
/// random state and the state of an optimizer that is not asked for are no concern.
/// Floating-point dtypes may differ: values are converted.
void check_state(
    const CheckpointManifest& manifest,
    const ModelSource& source,
    const Optimizer& optimizer);

/// Fills this rank's parts, reading only what it needs, and lets the model see them.
/// Every rank of the world calls. Returns what could not be taken over, a line each
/// (random state of another number of ranks, say). Throws CheckpointError.
std::vector<std::string> load_state(
    TrainingState& state,
    CheckpointReader& reader,
    const ModelSource& source,
    World& world,
    const MeshGroups& groups);

}  // namespace echelon
