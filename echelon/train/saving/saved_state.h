// What a rank saves of its training state, and how it restores that from a
// checkpoint of any layout.
//
//   StateSnapshot snapshot;  // one for all saves of a rank
//   snapshot.take(shards_to_save(state, source, world, groups));
//   write_rank_file(folder, rank_file_name(rank), snapshot.slices());
//
//   CheckpointReader reader(folder);
//   for (const auto& line : load_state(state, reader, source, world, groups)) …
//
// Names are those of the full model; a tied parameter has the first of its
// names. The optimizer's state is "PARAMETER/exp_avg" and the like, of the
// parameter's shape, and "PARAMETER/step", one number. Random state is
// "random/cpu/RANK" and, with a GPU, "random/cuda/RANK".
#pragma once

#include <ATen/core/Generator.h>
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

/// What a rank has of one tensor of the full model.
struct StateShard {
  std::string name;  // as in a manifest
  SavedKind kind = SavedKind::parameter;
  std::vector<int64_t> shape;  // of the full tensor
  /// The live tensor. Boxes refer to its elements in row-major order, whatever
  /// its own strides are.
  torch::Tensor tensor;
  std::vector<PlacedBox> boxes;  // none of them empty
};

/// What this rank writes, so that all ranks together write each element of the
/// model once. Replicas each write an equal number of bytes; who writes what
/// does not depend on values.
///
///   parameters and optimizer state   where tensor-parallel shards overlap, the
///                  rank that owns an element writes it
///   buffers        the first data-parallel rank writes them: others may have
///                  added statistics of their own samples, which the next
///                  forward replaces
///   random state   each rank writes its own
///
/// No rank communicates. State of frozen parameters is left out, and so are
/// the parameters of source.unsaved.
std::vector<StateShard> shards_to_save(
    const TrainingState& state, const ModelSource& source, const World& world,
    const MeshGroups& groups);

/// Everything that this rank has, without random state, in the model's order.
/// Parameters of one flat shard share their "step"; parameters that are tied,
/// across pipeline stages or within a rank, all have their first name.
std::vector<StateShard>
shards_to_load(const TrainingState& state, const ModelSource& source);

/// The values to write, in host memory: copies, in memory that is reused, or
/// the live values.
class StateSnapshot {
 public:
  /// Copies, into pinned memory where a shard is on a GPU, and waits for that:
  /// then training may continue. Overwrites what the last take() copied. Throws
  /// Error, with the bytes, when the host has too little memory.
  void take(const std::vector<StateShard>& parts);

  /// take() in two halves, between which forward and backward may run, but no
  /// update. begin() copies what such a pass changes (buffers, random state)
  /// and what is on a GPU; finish(), on any thread, copies parameters and
  /// optimizer state in host memory. begin() throws as take().
  void begin(const std::vector<StateShard>& parts);
  void finish();

  /// Does what take() does, but values in host memory are written from where
  /// they are, without a copy. The caller changes nothing until then.
  void refer_to(const std::vector<StateShard>& parts);

  /// The same, but copies what forward and backward change (buffers, random
  /// state): they may run until then, but no update.
  void refer_until_update(const std::vector<StateShard>& parts);

  /// The slices of the last call; their bytes live until the next.
  const std::vector<SliceBytes>& slices() const { return slices_; }
  /// The bytes of all slices.
  int64_t bytes() const { return bytes_; }

 private:
  /// How values are treated that are in host memory as they are written.
  enum class HostMemory {
    copied,
    copied_later,
    referred_to,
    referred_until_update
  };
  void fill(const std::vector<StateShard>& parts, HostMemory how);

  struct Later {
    const std::byte* from;
    std::byte* to;
    size_t bytes;
  };

  torch::Tensor memory_;
  std::vector<torch::Tensor> live_;  // tensors that are read later
  std::vector<Later> later_;
  std::vector<SliceBytes> slices_;
  int64_t bytes_ = 0;
};

/// Compares names, kinds, shapes and dtypes of parameters, buffers and the
/// state of `optimizer` with a manifest's. Throws CheckpointError that lists
/// every tensor that is missing, unexpected or different. Floating-point
/// dtypes may differ: values are converted. Random state is not compared, nor
/// state that this optimizer does not keep.
void check_state(
    const CheckpointManifest& manifest, const ModelSource& source,
    const Optimizer& optimizer);

/// Fills this rank's shards from a checkpoint of any layout, reading only what
/// it needs, and calls the model's after_load(). Every rank of `groups` calls
/// this, between steps.
///
/// Returns, the same on all ranks, what could not be restored as it was saved,
/// a line each: random state of another number of ranks; parameters of one flat
/// shard that were updated different numbers of times (the largest counts).
///
/// Throws CheckpointError on every rank when one rank fails, from check_state
/// or the reader. The state is then a mixture, to be filled from another
/// checkpoint or discarded.
std::vector<std::string> load_state(
    TrainingState& state, CheckpointReader& reader, const ModelSource& source,
    const World& world, const MeshGroups& groups);

// Shared by the sources of this folder.
namespace detail {

struct RandomSource {
  std::string name;  // in a manifest
  at::Generator generator;
};

/// The default generators of this rank.
std::vector<RandomSource>
random_sources(const World& world, const MeshGroups& groups);

/// The first of the ranks' errors that is not empty, as "rank 2: …"; without
/// the rank when there is only one.
std::string first_failure(const std::vector<std::string>& errors);

}  // namespace detail
}  // namespace echelon
