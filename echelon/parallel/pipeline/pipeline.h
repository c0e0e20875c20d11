// Trains a model that is cut into stages on several ranks, by any schedule.
//
//   Schedule schedule = …;                       // schedule/
//   Pipeline pipeline(
//       group, schedule,
//       build_stages(layers, cuts, schedule.rank_of_stage, group.rank()));
//   for each step:
//     pipeline.step(microbatches, loss);         // gradients are in .grad
//     optimizer.step();
//
// Transfers follow from the schedule: receives are posted before they are
// needed, and sends run while the next microbatch computes. What a rank stores
// of a microbatch is freed as soon as its backward is done.
//
// Shapes are learnt in the first step and checked in all others; when the
// shapes of the microbatches change, they are learnt again. From rank to rank
// tensors arrive with the strides that they were given with (channels last stay
// last; what is not dense arrives contiguous), gradients with those of their
// activations; strides may change, without shapes_vary the receiver keeps those
// of the first step. Sources: Huang et al., "GPipe", 2018, arXiv:1811.06965;
// Narayanan et al., "PipeDream", 2018, arXiv:1806.03377; Qi et al., "Zero
// Bubble Pipeline Parallelism", 2023, arXiv:2401.10241.
#pragma once

#include <torch/types.h>

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "echelon/comm/group.h"
#include "echelon/layers/layer_list.h"
#include "echelon/parallel/pipeline/pipeline_stage.h"
#include "echelon/schedule/schedule.h"
#include "echelon/timeline/recorder.h"

namespace echelon {

struct PipelineOptions {
  torch::Device device = torch::kCPU;
  /// Gets a span for each action ("0F3") and each wait ("wait 0F3"), on the
  /// track "compute".
  Recorder* recorder = nullptr;
  /// Parameters of different stages that are one; the same on every rank.
  std::vector<Tie> ties;
  /// Give tied parameters the first one's values; else they must be equal.
  bool copy_tied_values = false;
  /// A layer's output may have another shape although its input has not: each
  /// message says what it is, which costs another message.
  bool shapes_vary = false;
  /// Receives that are posted at a time. Each holds memory for one tuple.
  int32_t receives_ahead = 2;
  /// Match messages by their order instead of by tags. Always so on a GPU,
  /// whose communicator knows no tags; elsewhere receives are posted earlier
  /// without.
  bool messages_in_order = false;
  /// Called before each action that gives gradients to the stage's parameters,
  /// and told whether it is the step's last: data parallelism begins to reduce
  /// with it.
  std::function<void(int32_t stage, bool last)> before_gradients;
  /// Called when this rank's backwards are done, before the gradients of tied
  /// parameters are summed: data parallelism ends its reduction here.
  std::function<void()> after_backwards;
};

struct PipelineResult {
  /// By microbatch, detached; on the rank of the last stage, else empty.
  std::vector<torch::Tensor> losses;
  /// By stage of this rank, ascending: the most microbatches of which
  /// activations were stored at one time, from forward to backward (or W).
  std::vector<int32_t> peak_stored;
};

/// Every rank of the pipeline's group constructs one and makes the same calls.
/// Errors: ConfigError for a mistake in the model, the schedule or the calls;
/// CommError when another rank failed. After either the pipeline is unusable.
class Pipeline {
 public:
  /// The loss of one microbatch, a scalar, scaled as the caller wants:
  /// gradients of all microbatches add up. For a mean over the batch divide by
  /// the number of samples of the batch.
  using Loss =
      std::function<torch::Tensor(const Tensors& outputs, int64_t microbatch)>;

  /// `stages`: those that the schedule puts on this rank, ascending.
  Pipeline(
      Group group, Schedule schedule, std::vector<PipelineStage> stages,
      PipelineOptions options = {});
  ~Pipeline();
  Pipeline(Pipeline&&) noexcept;
  Pipeline& operator=(Pipeline&&) noexcept;

  /// Forwards and backwards of one batch; gradients accumulate in .grad.
  /// `microbatches`: as many as the schedule has, on the rank of stage 0; they
  /// may differ in size. Elsewhere empty. `loss`: on the rank of the last
  /// stage.
  PipelineResult
  step(const std::vector<Tensors>& microbatches, const Loss& loss = nullptr);

  /// Forwards alone, without gradients: what the last stage returns, by
  /// microbatch, on its rank; elsewhere empty. Any number of microbatches.
  std::vector<Tensors> evaluate(const std::vector<Tensors>& microbatches);

  /// From the next step on; with the same ranks for the same stages.
  void set_schedule(Schedule schedule);
  const Schedule& schedule() const;

  const std::vector<PipelineStage>& stages() const;
  bool has_first_stage() const;
  bool has_last_stage() const;
  /// Tied parameters of this rank that an earlier stage owns: to be left out of
  /// a gradient norm and of checkpoints.
  const std::set<std::string>& duplicates() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace echelon
