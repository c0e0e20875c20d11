// A model on this rank under any kind of parallelism, as the training loop and
// `verify` drive it. One implementation per strategy.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "echelon/comm/mesh_groups.h"
#include "echelon/data/dataset.h"
#include "echelon/job/job.h"
#include "echelon/layers/network.h"
#include "echelon/models/mixture.h"
#include "echelon/optim/clip.h"
#include "echelon/optim/optimizer.h"
#include "echelon/parallel/data/distributed_data_parallel.h"
#include "echelon/timeline/recorder.h"
#include "echelon/train/strategies/local_parameter.h"
#include "echelon/train/strategies/model_source.h"
#include "echelon/train/strategies/objective.h"

namespace echelon {

struct ModelPartition;

/// The ranks of a replica, which shard one copy of the model, call everything
/// together with the same batches. One of them counts each sample's loss: sum a
/// Score over the world.
///
/// The loss is the objective's (objective.h), summed over the units of all
/// ranks and divided by their number, whatever the layout.
class ParallelModel {
 public:
  virtual ~ParallelModel() = default;

  /// Forward and backward over this rank's part of a global batch, in
  /// microbatches; on return the gradients are those of the mean loss over the
  /// global batch.
  ///
  /// `count_units` asks the other ranks how many units there are (counts_units
  /// in model_source.h). Otherwise batch.global_count says it.
  virtual Score forward_backward(const Batch& batch, bool count_units) = 0;

  /// The model as it is, without gradients, in evaluation mode.
  virtual Score evaluate(const Batch& batch) = 0;

  /// The first layer, in the order of computation, with a NaN or an infinity;
  /// the same on all ranks of a replica.
  virtual std::optional<NonFinite> find_nonfinite(const Batch& batch) = 0;

  /// What this rank updates of each parameter, as it is now, each tensor once,
  /// in a fixed order. A parameter that is tied to one of an earlier pipeline
  /// rank has its own name here.
  virtual std::vector<LocalParameter> parameters() const = 0;
  /// The buffers of this rank, without gradients.
  virtual std::vector<LocalParameter> buffers() const = 0;

  /// What the optimizer updates: the parameters, or flat shards of them, whose
  /// gradients forward_backward() sets.
  ///
  ///   weight_decay  for parameters of two or more dimensions
  virtual std::vector<ParameterGroup>
  optimizer_groups(double weight_decay) const = 0;
  /// Call it after each update, so that forward sees the new values. `updated`
  /// is false when the step was skipped.
  virtual void after_update(bool updated) {}
  /// Call it before values are written into parameters(): returns when nothing
  /// that runs on this rank reads or writes them. Other ranks may still read.
  virtual void before_load() {}
  /// Call it on every rank, between steps, after values were written into
  /// parameters() and buffers(), so that forward sees them.
  virtual void after_load() {}

  /// The current gradients for their global norm; none when this rank has the
  /// full model.
  virtual std::optional<PartitionedGradients> partitioned_gradients() const = 0;

  /// How many tokens of this rank chose each expert in the last
  /// forward_backward(), and how many of these were dropped (RouterSteps):
  /// int64 [2, mixtures, experts] on the world's device. Over the world each
  /// counts once. Undefined in a model without experts.
  virtual torch::Tensor expert_counts() const { return {}; }

  /// The stages of a pipeline; null: there is none.
  virtual const ModelPartition* partition() const { return nullptr; }

  /// How the model is partitioned or sharded, in lines; empty when it is not.
  virtual std::vector<std::string> describe() const { return {}; }

  /// From now on gradients are those of the loss times `scale`
  /// (mixed_precision.h).
  /// `scale` is a float64 scalar on any device; undefined: 1.
  void set_gradient_scale(torch::Tensor scale) {
    gradient_scale_ = std::move(scale);
  }

 protected:
  torch::Tensor gradient_scale_;
};

/// What a model is built from, in addition to the job.
struct ModelPlace {
  const ModelSource& source;
  World& world;
  const MeshGroups& groups;  // of the job's layout
  timeline::Recorder* recorder =
      nullptr;  // gets the spans of forward and backward
  /// Gets the lines of describe() before anything is built.
  std::function<void(const std::string& line)> announce = nullptr;
};

/// Builds what job.layout asks for. Every rank of the world calls this (only
/// the ranks of place.groups when the layout is one device). Throws what the
/// model, its weights and the strategy's constructor throw. Borrows what
/// `place` refers to.
std::unique_ptr<ParallelModel>
make_parallel_model(const Job& job, const ModelPlace& place);

/// parameter_groups() of those that require gradients.
std::vector<ParameterGroup>
trained_groups(const std::vector<LocalParameter>& parts, double weight_decay);

/// The parameters, or buffers, of a module that nothing but tensor parallelism
/// shards.
std::vector<LocalParameter> local_parameters(const torch::nn::Module& module);
std::vector<LocalParameter> local_buffers(const torch::nn::Module& module);

/// Of `parts`, those that another rank counts for norms: ranks of ep that have
/// the same parameters, but for experts, count them once.
std::set<std::string> counted_elsewhere(
    const std::vector<LocalParameter>& parts, const MeshGroups& groups);

/// Its counts(), on one of several ranks that count the same tokens; zeros on
/// the others.
torch::Tensor counted_once(const models::RouterSteps& routers, bool here);

/// Data parallelism of the experts of a network, beside that of all else, when
/// they are spread over ranks.
///
///   ExpertParallel experts(*network, groups, options);
///   auto step = experts.begin_step();
///   … before the last backward: experts.begin_reduction(); …
///   experts.finish_reduction();
class ExpertParallel {
 public:
  /// Every rank of the world makes one.
  ExpertParallel(
      torch::nn::Module& network, const MeshGroups& groups,
      const DistributedDataParallelOptions& options);

  /// While the result lives, backward does not reduce by itself.
  std::shared_ptr<void> begin_step();
  void begin_reduction();
  void finish_reduction();

 private:
  std::unique_ptr<DataParallelModule> parallel_;  // null: nothing to do
};

/// `options` for all parameters but the experts that are spread over ranks.
DistributedDataParallelOptions without_experts(
    DistributedDataParallelOptions options, const MeshGroups& groups);

/// Sums a number over each of the groups, one after the other, which
/// communicate on `device` wherever the number is.
SumOverRanks sum_over(const std::vector<Group>& groups, torch::Device device);

/// The finding of a group's ranks that is in the earliest of `layers`. Every
/// rank of the group calls this and gets the same.
std::optional<NonFinite> earliest(
    const std::optional<NonFinite>& found,
    const std::vector<std::string>& layers, const Group& group,
    torch::Device device);

/// How much of the model's parameters this rank of dp_shard and tp has, in a
/// line; none where each rank has all of them.
std::vector<std::string> describe_share(
    const ModelPlace& place, const std::vector<LocalParameter>& parts);

/// Gives the lines to place.announce, if it is set.
void announce(const ModelPlace& place, const std::vector<std::string>& lines);

/// The forward and backward passes of one optimizer step: a rank's part of the
/// global batch, one microbatch after the other.
struct MicrobatchLoop {
  const TrainingObjective& objective;
  int64_t num_microbatches = 1;
  timeline::Recorder* recorder =
      nullptr;  // gets spans "forward" and "backward"

  /// Returns a guard that lives during a microbatch's forward and backward; may
  /// be null.
  std::function<std::shared_ptr<void>(bool last)> around = nullptr;
  std::function<Tensors(const Tensors& inputs)> forward;
  /// Called before a microbatch's backward.
  std::function<void(bool last)> before_backward = nullptr;

  /// Runs a prepared batch. Differentiates each microbatch's sum of losses
  /// times `scale`; gradients accumulate.
  Score run(const Batch& batch, const LossFactor& scale) const;
};

/// `inputs` of one sample of zeros: for a rank without samples that must gather
/// parameters with ranks that have some.
Tensors stand_in(const Tensors& inputs);

/// The objective of place.source on this rank of job.layout.
TrainingObjective objective_on(
    const Job& job, const ModelPlace& place, const TensorParallel& parallel);

/// Evaluates `outputs` for the samples of a prepared batch, or, of a rank that
/// has none, for a stand-in of them.
void score_batch(
    const TrainingObjective& objective, Score& score, const Tensors& outputs,
    const Batch& batch, bool empty);

/// One constructor per strategy; make_parallel_model chooses.
std::unique_ptr<ParallelModel>
make_data_parallel_model(const Job& job, const ModelPlace& place);
std::unique_ptr<ParallelModel>
make_sharded_model(const Job& job, const ModelPlace& place);
std::unique_ptr<ParallelModel>
make_placed_model(const Job& job, const ModelPlace& place);
std::unique_ptr<ParallelModel>
make_pipeline_model(const Job& job, const ModelPlace& place);

/// How data parallelism reduces the gradients of a network.
DistributedDataParallelOptions
data_parallel_options(const TrainOptions& train, bool sync_batch_norm);

}  // namespace echelon
