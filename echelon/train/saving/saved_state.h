// What a rank saves of its training, and filling it from a checkpoint of any
// layout.
//
//   StateSnapshot snapshot;                       // one for all saves of a
//   rank snapshot.take(parts_to_save(state, source, world, groups));
//   write_rank_file(folder, rank_file_name(rank), snapshot.slices());
//
//   CheckpointReader reader(folder);
//   for (const auto& line : load_state(state, reader, source, world, groups)) …
//
// Names are those of the whole model, tied parameters by the first of theirs;
// the optimizer's state is "PARAMETER/exp_avg" and alike, of the parameter's
// shape, and "PARAMETER/step", one number; random state is "random/cpu/RANK"
// and, with a GPU, "random/cuda/RANK".
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/checkpoint/files/rank_file.h"
#include "echelon/checkpoint/files/reader.h"
#include "echelon/checkpoint/format/box.h"
#include "echelon/checkpoint/format/manifest.h"
#include "echelon/comm/mesh_groups.h"
#include "echelon/train/strategies/step.h"

namespace echelon {

/// What is here of one tensor of the whole model.
struct StatePart {
  std::string name;  // as in a manifest
  SavedKind kind = SavedKind::parameter;
  std::vector<int64_t> shape;  // of the whole tensor
  /// The live one. Boxes are placed among its elements in row-major order,
  /// whatever its own strides are.
  torch::Tensor tensor;
  std::vector<PlacedBox> boxes;  // none that are empty
};

/// What this rank writes: with those of the other ranks each element of the
/// model once. Ranks that have the same share the work, each an equal number of
/// bytes; which of them writes what does not depend on values.
///
///   parameters, optimizer's state   of parts that overlap between
///   tensor-parallel
///                                   ranks, those that own them write them
///   buffers   the first data-parallel rank writes them: others may have added
///             statistics of their own samples, which the next forward replaces
///   random state  each rank its own
///
/// No rank communicates. State of parameters that are not trained is left out.
std::vector<StatePart> parts_to_save(
    const TrainingState& state, const ModelSource& source, const World& world,
    const MeshGroups& groups);

/// All that this rank has, random state left out, in the model's order.
/// Parameters of one flat shard share their "step"; parameters that are tied
/// across pipeline stages, or within one rank, all come by their first name.
std::vector<StatePart>
parts_to_load(const TrainingState& state, const ModelSource& source);

/// What is to be written, in the host's memory: copies, in memory that is used
/// again, or the live values.
class StateSnapshot {
 public:
  /// Copies, into pinned memory where a part is on a GPU, and waits until that
  /// is done: training may go on then. What the last take() gave is
  /// overwritten. Throws Error when the host has not so much memory, with the
  /// bytes.
  void take(const std::vector<StatePart>& parts);

  /// take() in two halves, between which forward and backward may run, but no
  /// update: begin() copies what such a pass changes (buffers, random state)
  /// and what lies on a GPU; finish(), on any thread, what the host's memory
  /// has of parameters and the optimizer's state. begin() throws as take().
  void begin(const std::vector<StatePart>& parts);
  void finish();

  /// For who waits until it is written, and changes nothing meanwhile: as
  /// take(), but what lies in the host's memory as it is written is not copied.
  void refer_to(const std::vector<StatePart>& parts);

  /// Of the last call; what they point to lives until the next.
  const std::vector<SliceBytes>& slices() const { return slices_; }
  /// Of all slices.
  int64_t bytes() const { return bytes_; }

 private:
  /// What is done about memory of the host that can be written as it lies.
  enum class HostMemory { copied, copied_later, referred_to };
  void fill(const std::vector<StatePart>& parts, HostMemory how);

  struct Later {
    const std::byte* from;
    std::byte* to;
    size_t bytes;
  };

  torch::Tensor memory_;
  std::vector<torch::Tensor> live_;  // that are read later
  std::vector<Later> later_;
  std::vector<SliceBytes> slices_;
  int64_t bytes_ = 0;
};

/// Compares names, kinds, shapes and dtypes of parameters, buffers and the
/// state of `optimizer` with a manifest's. Throws CheckpointError that lists
/// every one that is missing, unexpected, or other than here. Floating-point
/// dtypes may differ: values are converted. Random state is no concern, nor
/// state that this optimizer does not keep.
void check_state(
    const CheckpointManifest& manifest, const ModelSource& source,
    const Optimizer& optimizer);

/// Fills this rank's parts, reading only what it needs, and lets the model see
/// them; the checkpoint may be of any layout. Every rank of `groups` calls it,
/// and between steps.
///
/// Returns, the same on all ranks, what could not be taken over as it was
/// saved, a line each: random state of another number of ranks, parameters of
/// one flat shard that were updated another number of times each (the largest
/// counts).
///
/// Throws CheckpointError on every rank when it fails on one: what check_state
/// says, or what the reader found. The state is a mixture then, to be filled
/// from another checkpoint or given up.
std::vector<std::string> load_state(
    TrainingState& state, CheckpointReader& reader, const ModelSource& source,
    const World& world, const MeshGroups& groups);

}  // namespace echelon
