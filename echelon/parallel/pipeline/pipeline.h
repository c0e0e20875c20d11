// Trains a model that is partitioned into stages on several ranks, by any
// schedule.
//
//   Schedule schedule = …;                        // see schedule/
//   const auto bounds = partition_evenly(layers, schedule.num_stages());
//   Pipeline pipeline(
//       group, schedule,
//       build_stages(layers, bounds, schedule.rank_of_stage, group.rank()));
//   for each step:
//     pipeline.step(microbatches, loss);          // gradients are in .grad
//     optimizer.step();
//
// The transfers follow from the schedule: receives are posted before they are
// needed, and sends run while the next microbatch computes. What a rank stores
// of a microbatch is freed as soon as its backward is done.
//
// Shapes are recorded in the first step and checked in later steps; when the
// shapes of the microbatches change, they are recorded again. Tensors keep
// their strides from rank to rank (channels last stay last; a tensor that is
// not dense arrives contiguous), and gradients have the strides of their
// activations. If strides change later, the receiver keeps those of the first
// step, unless shapes_vary is set.
//
// Sources: Huang et al., "GPipe", 2018, arXiv:1811.06965; Narayanan et al.,
// "PipeDream", 2018, arXiv:1806.03377; Qi et al., "Zero Bubble Pipeline
// Parallelism", 2023, arXiv:2401.10241.
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "echelon/comm/group.h"
#include "echelon/layers/layer_list.h"
#include "echelon/layers/network.h"
#include "echelon/schedule/schedule.h"
#include "echelon/timeline/recorder.h"

namespace echelon {

/// A stage on the rank that the schedule assigns it to.
struct PipelineStage {
  int32_t stage = 0;
  std::vector<Layer> layers;

  /// ("layer.parameter", tensor) in order; a tensor that layers share once.
  std::vector<std::pair<std::string, torch::Tensor>> named_parameters() const;
};

/// The layers of a network as a stage, which shares their modules.
PipelineStage stage_of(const Network& network, int32_t stage);

/// Builds layers [begin, end) of `list`. With a seed, parameters and ties
/// within the stage are initialised as by build_network (layers/network.h), so
/// they do not depend on the partition. Without one, parameters are as the
/// layers' `build` leaves them, to be overwritten.
PipelineStage build_stage(
    const LayerList& list, int32_t stage, size_t begin, size_t end,
    std::optional<uint64_t> seed = std::nullopt);

/// Partitions the layers into `num_stages` slices of nearly equal numbers of
/// layers: returns where each stage begins, and the end. Throws ConfigError for
/// more stages than layers.
std::vector<size_t> partition_evenly(const LayerList& list, int32_t num_stages);

/// Builds the stages of `rank`. Stage i has the layers [bounds[i], bounds[i +
/// 1]).
std::vector<PipelineStage> build_stages(
    const LayerList& list, const std::vector<size_t>& bounds,
    const std::vector<int32_t>& rank_of_stage, int32_t rank,
    std::optional<uint64_t> seed = std::nullopt);

struct PipelineOptions {
  torch::Device device = torch::kCPU;
  /// Receives a span for each action ("0F3") and each wait ("wait 0F3"), on the
  /// track "compute".
  timeline::Recorder* recorder = nullptr;
  /// Parameters of different stages that are tied; the same list on every rank.
  std::vector<Tie> ties;
  /// Copy the values of the first tied parameter to the others; false: they
  /// must be equal.
  bool copy_tied_values = false;
  /// The shape of a layer's output may change while that of its input does not.
  /// Each transfer then sends its shape first, which costs another message.
  bool shapes_vary = false;
  /// Receives that are posted at the same time. Each holds memory for one
  /// tuple.
  int32_t receives_ahead = 2;
  /// Match messages by their order instead of by tags. Always so on a GPU,
  /// whose communicator knows no tags; elsewhere tags allow earlier receives.
  bool messages_in_order = false;
  /// Called before each action that computes gradients of the stage's
  /// parameters. `last` tells whether it is the step's last one for this stage:
  /// from then on data parallelism may reduce.
  std::function<void(int32_t stage, bool last)> before_gradients;
  /// Called after this rank's last backward, before the gradients of tied
  /// parameters are summed: data parallelism finishes its reduction here.
  std::function<void()> after_backwards;
};

struct PipelineResult {
  /// By microbatch, detached; on the rank of the last stage, else empty.
  std::vector<torch::Tensor> losses;
  /// By stage of this rank, ascending: the largest number of microbatches whose
  /// activations were stored at the same time, from forward to backward (or W).
  std::vector<int32_t> peak_stored;
};

/// Every rank of the pipeline's group constructs one and makes the same calls.
/// Throws ConfigError for a mistake in the model, the schedule or the calls,
/// and CommError when another rank failed. After either, build a new pipeline.
class Pipeline {
 public:
  /// The loss of one microbatch, a scalar. Gradients of all microbatches add
  /// up, so for a mean over the batch divide by the number of samples of the
  /// batch.
  using Loss =
      std::function<torch::Tensor(const Tensors& outputs, int64_t microbatch)>;

  /// `stages`: those that the schedule assigns to this rank, ascending.
  Pipeline(
      Group group, Schedule schedule, std::vector<PipelineStage> stages,
      PipelineOptions options = {});
  ~Pipeline();
  Pipeline(Pipeline&&) noexcept;
  Pipeline& operator=(Pipeline&&) noexcept;

  /// Runs forward and backward of one batch; gradients accumulate in .grad. The
  /// rank of stage 0 passes as many `microbatches` as the schedule has, which
  /// may differ in size; other ranks pass none. The rank of the last stage
  /// passes `loss`.
  ///
  ///   shapes  0: the ranks ask each other what they call and with which
  ///           shapes, which waits for the device. Else a number that all of
  ///           them give alike, another one for other shapes of microbatches or
  ///           other parameters that require gradients: they ask each other the
  ///           first time that they give it.
  PipelineResult step(
      const std::vector<Tensors>& microbatches, const Loss& loss = nullptr,
      int64_t shapes = 0);

  /// Runs forward alone, without gradients, on any number of microbatches.
  /// Returns the outputs of the last stage by microbatch on its rank, elsewhere
  /// nothing.
  std::vector<Tensors> evaluate(const std::vector<Tensors>& microbatches);

  /// Sets the schedule of later steps. It must assign the stages to the same
  /// ranks.
  void set_schedule(Schedule schedule);
  const Schedule& schedule() const;

  const std::vector<PipelineStage>& stages() const;
  bool has_first_stage() const;
  bool has_last_stage() const;
  /// Tied parameters of this rank that an earlier stage owns: leave them out of
  /// gradient norms and checkpoints.
  const std::set<std::string>& duplicates() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace echelon
