// One optimizer step of a classifier: what the training loop and `verify`
// share.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "echelon/comm/mesh_groups.h"
#include "echelon/data/dataset.h"
#include "echelon/data/loader.h"
#include "echelon/job/job.h"
#include "echelon/optim/learning_rate.h"
#include "echelon/optim/loss_scaler.h"
#include "echelon/optim/optimizer.h"
#include "echelon/timeline/recorder.h"
#include "echelon/train/strategies/parallel_model.h"

namespace echelon {

struct StepUpdate {
  /// Of all gradients, before clipping; 0 unless it was clipped or asked for.
  double norm = 0;
  /// False: a gradient was not finite on some rank, so nothing was updated.
  bool updated = true;
  /// That the loss was multiplied by; none when it was not.
  std::optional<double> loss_scale;
  /// Of each of the layers that were asked for, before clipping; empty in a
  /// step that was skipped.
  std::vector<double> layer_norms;
};

/// A model, as the layout cuts it, and its optimizer on one rank.
class TrainingState {
 public:
  /// Every rank of the world calls. Loads [model] weights when set. Throws what
  /// the model, its weights, the strategy and the optimizer throw.
  TrainingState(const Job& job, const ModelPlace& place, int64_t total_steps);

  ParallelModel& model() { return *model_; }
  const ParallelModel& model() const { return *model_; }
  Optimizer& optimizer() { return *optimizer_; }
  const Optimizer& optimizer() const { return *optimizer_; }
  const LossScaler& loss_scaler() const { return scaler_; }
  /// Of a checkpoint; the model goes on with its scale.
  void load_loss_scale(const LossScaler::State& state);

  /// Divides gradients by the loss scale, clips (when asked to), sets the
  /// schedule's learning rate for `step` (from 0) and updates. Measuring the
  /// norm costs a pass over the gradients, that of each of `layers` (null:
  /// none) another. Throws NumericError when too many steps in a row were
  /// skipped.
  StepUpdate update(
      int64_t step, bool measure_norm, Recorder* recorder,
      const std::vector<std::string>* layers = nullptr);

 private:
  bool unscale();
  double norm();

  OptimizerOptions options_;
  std::unique_ptr<ParallelModel> model_;
  std::unique_ptr<Optimizer> optimizer_;
  LearningRateSchedule schedule_;
  LossScaler scaler_;
};

/// This rank's part of the job's batches to train on; `groups` may be of
/// another layout than the job's (one rank: all of each).
LoaderOptions training_batches(
    const Job& job, const TrainingData& data, const MeshGroups& groups);

/// The job's steps: train.steps, or train.epochs counted in batches.
int64_t total_steps(const Job& job, int64_t batches_per_epoch);

}  // namespace echelon
