// A model on this rank, however it is cut: what the training loop and `verify`
// drive. One implementation per strategy.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "echelon/comm/mesh_groups.h"
#include "echelon/data/dataset.h"
#include "echelon/models/network.h"
#include "echelon/optim/clip.h"
#include "echelon/optim/optimizer.h"
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

/// Ranks with the same samples (those of one pipeline) call everything together,
/// with the same batches. Each sample's loss is counted on one of them alone: sum
/// a Score over the world.
///
/// The loss is cross-entropy, summed over the samples of all ranks and divided
/// by their number, whatever the layout.
class ParallelModel {
 public:
  virtual ~ParallelModel() = default;

  /// Forward and backward over this rank's part of a global batch, in
  /// microbatches; on return the gradients are those of the mean loss over the
  /// global batch. `recorder` may be null.
  ///
  /// `count_samples` asks the other ranks how many samples there are; needed
  /// when a rank may have left some out. Otherwise batch.global_count says it.
  virtual Score forward_backward(
      const Batch& batch, bool count_samples, Recorder* recorder) = 0;

  /// The model as it is, without gradients, in evaluation mode.
  virtual Score evaluate(const Batch& batch) = 0;

  /// The first layer, in the order of computation, with a NaN or an infinity;
  /// the same on all ranks of one pipeline.
  virtual std::optional<NonFinite> find_nonfinite(const Batch& batch) = 0;

  /// The parameters that this rank updates, by the whole model's names, each
  /// tensor once.
  virtual NamedTensors parameters() const = 0;
  /// Parameters and buffers that live here, as a state dict has them.
  virtual NamedTensors state() const = 0;

  /// For the norm of all gradients: sums over the ranks that hold other parts of
  /// the model. Null when all of it is here.
  virtual SumOverRanks sum_over_parts() const { return nullptr; }

  /// How the model was cut, a line per part; empty when it was not.
  virtual std::vector<std::string> describe() const { return {}; }
};

/// Builds what job.layout asks for. Every rank of the world calls. Throws what
/// the model, its weights and the strategy's constructor throw.
std::unique_ptr<ParallelModel> make_parallel_model(
    const Job& job,
    const std::vector<int64_t>& input_shape,
    int64_t classes,
    const MeshGroups& groups,
    torch::Device device);

/// A batch on `device`, its inputs in `dtype`.
Batch prepared(const Batch& batch, torch::Device device, torch::Dtype dtype);

/// Sum over the samples; and how many answers are right.
torch::Tensor
loss_sum_of(const torch::Tensor& scores, const torch::Tensor& targets);
int64_t
count_correct(const torch::Tensor& scores, const torch::Tensor& targets);

/// "float64" -> torch::kFloat64.
torch::Dtype dtype_of(const std::string& name);

/// One constructor per strategy; make_parallel_model chooses.
std::unique_ptr<ParallelModel> make_data_parallel_model(
    const Job& job,
    const std::vector<int64_t>& input_shape,
    int64_t classes,
    const MeshGroups& groups,
    torch::Device device);

/// What data parallelism does with the gradients of one part of the model.
DistributedDataParallelOptions data_parallel_options(const Job& job);

}  // namespace echelon
