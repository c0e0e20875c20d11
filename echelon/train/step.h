// One optimizer step of a classifier: what the training loop and `verify` share.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "echelon/comm/world.h"
#include "echelon/data/dataset.h"
#include "echelon/models/network.h"
#include "echelon/optim/optimizer.h"
#include "echelon/optim/schedule.h"
#include "echelon/parallel/data/distributed_data_parallel.h"
#include "echelon/timeline/recorder.h"
#include "echelon/train/job.h"

namespace echelon {

/// Samples, their losses and right answers, over some batches.
struct Score {
  double loss_sum = 0;
  int64_t count = 0;
  int64_t correct = 0;
};

/// A model, its data-parallel wrapper and its optimizer on one rank.
///
/// The loss is cross-entropy, summed over the samples of all ranks and divided
/// by their number, whatever the layout.
class TrainingState {
 public:
  /// Every rank of `group` (the ranks with different samples) calls. Loads
  /// [model] weights when set. Throws what the model, its weights, the optimizer
  /// and the wrapper throw.
  TrainingState(
      const Job& job,
      const std::vector<int64_t>& input_shape,
      int64_t classes,
      int64_t total_steps,
      const Group& group,
      torch::Device device);

  Network& network() { return *network_; }
  const Optimizer& optimizer() const { return *optimizer_; }

  /// Forward and backward over this rank's part of a global batch, in
  /// `accumulate` microbatches; gradients are reduced in the last one. Returns
  /// this rank's score. `recorder` may be null.
  ///
  /// `count_samples` asks the other ranks how many samples there are; needed
  /// when a rank may have left some out. Otherwise batch.global_count says it.
  Score forward_backward(
      const Batch& batch, bool count_samples, Recorder* recorder);

  /// Clips (when asked to), sets the schedule's learning rate for `step` (from
  /// 0) and updates. Returns the gradients' norm before clipping; measuring it
  /// costs a pass over them, so it is 0 unless clipped or asked for.
  double update(int64_t step, bool measure_norm, Recorder* recorder);

  /// Score of the model as it is, without gradients, in evaluation mode.
  Score evaluate(const Batch& batch);

  /// A batch on this rank's device and in the model's dtype.
  Batch prepared(const Batch& batch) const;

 private:
  Job job_;
  torch::Device device_;
  torch::Dtype dtype_;
  std::shared_ptr<Network> network_;
  std::unique_ptr<DistributedDataParallel<std::shared_ptr<Network>>> parallel_;
  std::unique_ptr<Optimizer> optimizer_;
  Schedule schedule_;
};

/// The job's steps: train.steps, or train.epochs counted in batches.
int64_t total_steps(const Job& job, int64_t batches_per_epoch);

/// "float64" -> torch::kFloat64.
torch::Dtype dtype_of(const std::string& name);

}  // namespace echelon
