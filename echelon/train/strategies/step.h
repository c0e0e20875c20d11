// One optimizer step, shared by the training loop and `verify`.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "echelon/comm/mesh_groups.h"
#include "echelon/data/dataset.h"
#include "echelon/data/loader.h"
#include "echelon/job/job.h"
#include "echelon/optim/mixed_precision.h"
#include "echelon/optim/optimizer.h"
#include "echelon/timeline/recorder.h"
#include "echelon/train/strategies/parallel_model.h"

namespace echelon {

struct StepUpdate {
  /// The norm of all gradients before clipping; 0 unless they were clipped or
  /// it was asked for.
  double norm = 0;
  /// False when a gradient or the norm was not finite on some rank, or the
  /// caller asked for it: nothing was updated.
  bool updated = true;
  /// The factor of the loss; none without loss scaling.
  std::optional<double> loss_scale;
  /// The norms of the layers that were asked for, before clipping; empty in a
  /// skipped step.
  std::vector<double> layer_norms;
};

/// The norms of the gradients of layers.
class LayerNorms {
 public:
  /// The 2-norm of the gradients of each of `layers`, the names of all of the
  /// model's layers; 0 for a layer without parameters, NaN or infinite where a
  /// gradient is. A tied parameter counts for the layer of its first name.
  /// Every rank calls, and gets the same: each element of the model counts
  /// once. One small sum over the ranks. float64 on `device`.
  torch::Tensor measure(
      const ParallelModel& model, const std::vector<std::string>& layers,
      torch::Device device);

 private:
  // Gradients of one device and dtype, and the layer of each.
  struct List {
    std::vector<torch::Tensor> gradients;
    std::vector<int64_t> layers;
  };
  torch::Tensor places(
      const detail::TensorKind& kind, const List& list, torch::Device device);

  // The layers of the last lists, by kind, on the host and on the device.
  std::map<detail::TensorKind, std::pair<std::vector<int64_t>, torch::Tensor>>
      places_;
};

/// What one rank has of a model in its layout, and its optimizer.
class TrainingState {
 public:
  /// Every rank of the world makes one. Loads [model] weights when set. Throws
  /// what the model, its weights, the strategy and the optimizer throw.
  TrainingState(const Job& job, const ModelPlace& place, int64_t total_steps);

  ParallelModel& model() { return *model_; }
  const ParallelModel& model() const { return *model_; }
  Optimizer& optimizer() { return *optimizer_; }
  const Optimizer& optimizer() const { return *optimizer_; }
  const LossScaler& loss_scaler() const { return scaler_; }
  /// Restores the state of a checkpoint; the model uses its scale.
  void load_loss_scale(const LossScaler::State& state);

  /// Call it before forward_backward(). Unless train.on_non_finite is "stop", a
  /// step that is skipped also leaves the buffers as they were now, such as the
  /// running statistics of norms.
  void before_forward();

  /// Divides gradients by the loss scale, clips them if the job says so, sets
  /// the schedule's learning rate for `step` (from 0) and updates, unless a
  /// gradient or the norm is not finite on some rank. Measuring the global norm
  /// costs a pass over the gradients (clipping and train.on_non_finite other
  /// than "stop" do it in each step), and measuring that of each of `layers`
  /// (null: none) another. On CUDA GPUs dividing and clipping cost none: the
  /// update does both as it reads. Throws NumericError when too many steps in a
  /// row were skipped. Waits for the device.
  StepUpdate update(
      int64_t step, bool measure_norm, timeline::Recorder* recorder,
      const std::vector<std::string>* layers = nullptr);

  /// The same without a wait. Returns the numbers that read_update() takes,
  /// float64 on the model's device.
  ///
  ///   skip  a float32 scalar: 1 leaves the parameters and the loss scale as
  ///         they are; undefined: 0
  torch::Tensor update_on_device(
      int64_t step, bool measure_norm, timeline::Recorder* recorder,
      const std::vector<std::string>* layers, const torch::Tensor& skip);
  /// What update_on_device() does, one after the other, for a CUDA graph: what
  /// the host says to the device in each step, what the device does, and what
  /// the model begins for the next forward pass.
  void begin_update(int64_t step);
  torch::Tensor update_parameters(
      bool measure_norm, timeline::Recorder* recorder,
      const std::vector<std::string>* layers, const torch::Tensor& skip);
  void end_update(bool updated = true) { model_->after_update(updated); }
  /// `numbers`: update_on_device()'s, on the CPU. Throws as update().
  StepUpdate read_update(const torch::Tensor& numbers) const;

 private:
  void use_scale();
  torch::Tensor check_scaled(const torch::Tensor& skip);
  torch::Tensor norm();
  void restore_buffers(const torch::Tensor& skipped);

  OptimizerOptions options_;
  bool skips_;  // steps that are not finite
  torch::Device device_;
  std::unique_ptr<ParallelModel> model_;
  std::unique_ptr<Optimizer> optimizer_;
  LearningRateSchedule schedule_;
  LossScaler scaler_;
  // Of the model, with skips_, and what they were before the forward pass.
  std::vector<torch::Tensor> buffers_, buffers_before_;
  LayerNorms layer_norms_;
};

/// This rank's part of the job's training batches; `groups` may be of another
/// layout than the job's (one rank takes full batches).
LoaderOptions training_batches(
    const Job& job, const TrainingData& data, const MeshGroups& groups);

/// The same for the samples that are held out for evaluation.
LoaderOptions held_out_batches(
    const Job& job, const TrainingData& data, const MeshGroups& groups);

/// The next batch of this rank's loader of `data`. Every rank of `together`
/// calls this (null: this rank alone). Ranks that read a stream first tell each
/// other how far they are: where one has fewer samples than another, or is
/// elsewhere, each throws DataError, which names it, and none waits for
/// another.
std::optional<Batch>
next_batch(Loader& loader, const Dataset& data, const World* together);

/// Throws DataError on every rank of the world where some have a data set of
/// their own with another size or other samples than rank 0.
void check_same_data(const OwnParts& own, World& world);

/// The job's steps: train.steps, or train.epochs counted in batches. Throws
/// ConfigError for epochs of an unknown size.
int64_t total_steps(const TrainOptions& options, int64_t batches_per_epoch);

}  // namespace echelon
