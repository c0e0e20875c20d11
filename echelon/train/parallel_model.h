// A model on this rank, however it is cut: what the training loop and `verify`
// drive. One implementation per strategy.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "echelon/comm/mesh_groups.h"
#include "echelon/data/dataset.h"
#include "echelon/models/network.h"
#include "echelon/models/sharded_module.h"
#include "echelon/optim/clip.h"
#include "echelon/optim/optimizer.h"
#include "echelon/parallel/data/distributed_data_parallel.h"
#include "echelon/timeline/recorder.h"
#include "echelon/train/job.h"
#include "echelon/train/model_source.h"
#include "echelon/train/objective.h"

namespace echelon {

/// Ranks with the same samples (those that hold parts of one copy of the model)
/// call everything together, with the same batches. Each sample's loss is counted
/// on one of them alone: sum a Score over the world.
///
/// What is minimised is the objective's loss (objective.h), summed over the units
/// of all ranks and divided by their number, whatever the layout.
class ParallelModel {
 public:
  virtual ~ParallelModel() = default;

  /// Forward and backward over this rank's part of a global batch, in
  /// microbatches; on return the gradients are those of the mean loss over the
  /// global batch.
  ///
  /// `count_units` asks the other ranks how many units there are (counts_units
  /// below). Otherwise batch.global_count says it.
  virtual Score forward_backward(const Batch& batch, bool count_units) = 0;

  /// The model as it is, without gradients, in evaluation mode.
  virtual Score evaluate(const Batch& batch) = 0;

  /// The first layer, in the order of computation, with a NaN or an infinity;
  /// the same on all ranks with these samples.
  virtual std::optional<NonFinite> find_nonfinite(const Batch& batch) = 0;

  /// The parameters that this rank updates, by name, each tensor once. One that
  /// is tied to an earlier layer of another part has its own name here.
  virtual NamedTensors parameters() const = 0;
  /// Parameters and buffers that live here, as a state dict has them.
  virtual NamedTensors state() const = 0;
  /// Of the tensors of which a part lives here, which part that is; those that
  /// are not among them are whole.
  virtual std::map<std::string, ParameterShard> shards() const { return {}; }

  /// For the norm of all gradients, as they are now. Nothing when all of the
  /// model is here.
  virtual std::optional<SharedOutGradients> shared_out_gradients() const {
    return std::nullopt;
  }

  /// How the model was cut, a line per part; empty when it was not.
  virtual std::vector<std::string> describe() const { return {}; }
};

/// What a model is built from, beside the job.
struct ModelPlace {
  const ModelSource& source;
  World& world;
  const MeshGroups& groups;  // of the job's layout
  Recorder* recorder = nullptr;  // gets the spans of forward and backward
  /// Told how the model will be cut, a line per part, before anything is built.
  std::function<void(const std::string& line)> announce = nullptr;
};

/// Builds what job.layout asks for. Every rank of the world calls (the ranks of
/// place.groups alone when the layout is one device). Throws what the model, its
/// weights and the strategy's constructor throw. What `place` refers to outlives
/// the result.
std::unique_ptr<ParallelModel>
make_parallel_model(const Job& job, const ModelPlace& place);

/// The ranks that compute each layer together.
TensorParallel tensor_parallel(const Job& job, const MeshGroups& groups);

/// What this rank counts of the gradients of `parameters`: of those that are cut
/// what it owns, of whole ones all on the group's first rank.
///
///   leave_out  parameters that another rank counts
std::vector<torch::Tensor> counted_gradients(
    const NamedTensors& parameters,
    const std::map<std::string, ParameterShard>& shards,
    const Group& tensor_parallel,
    const std::set<std::string>& leave_out = {});

/// Sums a number over each of the groups, one after the other.
SumOverRanks sum_over(const std::vector<Group>& groups);

/// Of the findings of a group's ranks the one in the earliest of `layers`. Every
/// rank of the group calls this and gets the same.
std::optional<NonFinite> earliest(
    const std::optional<NonFinite>& found,
    const std::vector<std::string>& layers,
    const Group& group,
    torch::Device device);

/// Tells place.announce, where there is one.
void announce(
    const ModelPlace& place, const std::vector<std::string>& lines);

/// One constructor per strategy; make_parallel_model chooses.
std::unique_ptr<ParallelModel>
make_data_parallel_model(const Job& job, const ModelPlace& place);
std::unique_ptr<ParallelModel>
make_placed_model(const Job& job, const ModelPlace& place);
std::unique_ptr<ParallelModel>
make_pipeline_model(const Job& job, const ModelPlace& place);

/// What data parallelism does with the gradients of one part of the model.
DistributedDataParallelOptions data_parallel_options(const Job& job);

}  // namespace echelon
