// A model on this rank, however it is cut: what the training loop and `verify`
// drive. One implementation per strategy.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "echelon/comm/mesh_groups.h"
#include "echelon/data/dataset.h"
#include "echelon/job/job.h"
#include "echelon/layers/network.h"
#include "echelon/optim/clip.h"
#include "echelon/optim/optimizer.h"
#include "echelon/parallel/data/distributed_data_parallel.h"
#include "echelon/timeline/recorder.h"
#include "echelon/train/strategies/model_source.h"
#include "echelon/train/strategies/objective.h"
#include "echelon/train/strategies/parameter_part.h"

namespace echelon {

/// Ranks with the same samples (those that hold parts of one copy of the model)
/// call everything together, with the same batches. Each sample's loss is
/// counted on one of them alone: sum a Score over the world.
///
/// What is minimised is the objective's loss (objective.h), summed over the
/// units of all ranks and divided by their number, whatever the layout.
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

  /// What of each parameter this rank updates, as it is now, each tensor once,
  /// in one order. One that is tied to an earlier layer of another rank of the
  /// pipeline has its own name here.
  virtual std::vector<ParameterPart> parts() const = 0;
  /// The buffers that live here, without gradients.
  virtual std::vector<ParameterPart> buffers() const = 0;

  /// What the optimizer updates: the parameters, or flat tensors with what of
  /// them is here. By then forward_backward() has set their gradients.
  ///
  ///   weight_decay  of parameters of two and more dimensions
  virtual std::vector<ParameterGroup>
  optimizer_groups(double weight_decay) const = 0;
  /// After each update: forward sees the new values. `updated`: false when the
  /// step was skipped.
  virtual void after_update(bool updated) {}
  /// Before values are written into parts(): returns when nothing of this rank
  /// that runs beside reads or writes them. Other ranks may still be reading.
  virtual void before_load() {}
  /// After values were written into parts() and buffers(), on every rank and
  /// between steps: forward sees them.
  virtual void after_load() {}

  /// For the norm of all gradients, as they are now. Nothing when all of the
  /// model is here.
  virtual std::optional<SharedOutGradients> shared_out_gradients() const = 0;

  /// How the model was cut, a line per part; empty when it was not.
  virtual std::vector<std::string> describe() const { return {}; }

  /// Gradients are those of the loss times this from now on (loss_scaler.h).
  void set_gradient_scale(double scale) { gradient_scale_ = scale; }

 protected:
  double gradient_scale_ = 1;
};

/// What a model is built from, beside the job.
struct ModelPlace {
  const ModelSource& source;
  World& world;
  const MeshGroups& groups;      // of the job's layout
  Recorder* recorder = nullptr;  // gets the spans of forward and backward
  /// Told how the model will be cut, a line per part, before anything is built.
  std::function<void(const std::string& line)> announce = nullptr;
};

/// Builds what job.layout asks for. Every rank of the world calls (the ranks of
/// place.groups alone when the layout is one device). Throws what the model,
/// its weights and the strategy's constructor throw. What `place` refers to
/// outlives the result.
std::unique_ptr<ParallelModel>
make_parallel_model(const Job& job, const ModelPlace& place);

/// The ranks that compute each layer together.
TensorParallel tensor_parallel(const Job& job, const MeshGroups& groups);

/// Parts that are no more cut than tensor parallelism does, of the parameters
/// or buffers of a module.
std::vector<ParameterPart> parameter_parts(const torch::nn::Module& module);
std::vector<ParameterPart> buffer_parts(const torch::nn::Module& module);

/// Sums a number over each of the groups, one after the other; they communicate
/// on `device`, wherever the number is.
SumOverRanks sum_over(const std::vector<Group>& groups, torch::Device device);

/// Of the findings of a group's ranks the one in the earliest of `layers`.
/// Every rank of the group calls this and gets the same.
std::optional<NonFinite> earliest(
    const std::optional<NonFinite>& found,
    const std::vector<std::string>& layers, const Group& group,
    torch::Device device);

/// Tells place.announce, where there is one.
void announce(const ModelPlace& place, const std::vector<std::string>& lines);

/// One constructor per strategy; make_parallel_model chooses.
std::unique_ptr<ParallelModel>
make_data_parallel_model(const Job& job, const ModelPlace& place);
std::unique_ptr<ParallelModel>
make_sharded_model(const Job& job, const ModelPlace& place);
std::unique_ptr<ParallelModel>
make_placed_model(const Job& job, const ModelPlace& place);
std::unique_ptr<ParallelModel>
make_pipeline_model(const Job& job, const ModelPlace& place);

/// What data parallelism does with the gradients of one part of the model.
DistributedDataParallelOptions data_parallel_options(const Job& job);

}  // namespace echelon
