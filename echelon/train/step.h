// One optimizer step of a classifier: what the training loop and `verify` share.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <memory>

#include "echelon/optim/optimizer.h"
#include "echelon/optim/learning_rate.h"
#include "echelon/timeline/recorder.h"
#include "echelon/train/job.h"
#include "echelon/train/parallel_model.h"

namespace echelon {

/// A model, as the layout cuts it, and its optimizer on one rank.
class TrainingState {
 public:
  /// Every rank of the world calls. Loads [model] weights when set. Throws what
  /// the model, its weights, the strategy and the optimizer throw.
  TrainingState(
      const Job& job, const ModelPlace& place, int64_t total_steps);

  ParallelModel& model() { return *model_; }
  const Optimizer& optimizer() const { return *optimizer_; }

  /// Clips (when asked to), sets the schedule's learning rate for `step` (from
  /// 0) and updates. Returns the gradients' norm before clipping; measuring it
  /// costs a pass over them, so it is 0 unless clipped or asked for.
  double update(int64_t step, bool measure_norm, Recorder* recorder);

 private:
  OptimizerOptions options_;
  std::unique_ptr<ParallelModel> model_;
  std::unique_ptr<Optimizer> optimizer_;
  LearningRateSchedule schedule_;
};

/// The job's steps: train.steps, or train.epochs counted in batches.
int64_t total_steps(const Job& job, int64_t batches_per_epoch);

}  // namespace echelon
