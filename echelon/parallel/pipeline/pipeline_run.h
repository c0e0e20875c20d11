// One call of the pipeline on one rank: carries out the planned actions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/parallel/pipeline/pipeline.h"
#include "echelon/parallel/pipeline/stage_graph.h"
#include "echelon/parallel/pipeline/transfer_plan.h"
#include "echelon/parallel/pipeline/transfers.h"
#include "echelon/parallel/pipeline/tuple_shape.h"

namespace echelon::pipeline {

/// What the shapes of the microbatches lead to at this rank's stages.
struct LearntShapes {
  struct Stage {
    std::vector<TupleShape> inputs;  // by microbatch
    std::vector<TupleShape> outputs;
  };
  std::vector<Stage> stages;  // by this rank's stages
  bool complete = false;      // a call has filled it
};

/// What stays the same from call to call.
struct Setting {
  const Group& group;
  const PipelineOptions& options;
  const std::vector<PipelineStage>& stages;
  int32_t num_stages = 0;
  std::vector<std::string> last_layers;  // by stage of the pipeline
  /// Index into `stages`, by stage of the pipeline; -1: on another rank.
  std::vector<int32_t> local;
};

class PipelineRun {
 public:
  PipelineRun(
      const Setting& setting, const TransferPlan& plan, LearntShapes& learnt,
      bool training, const std::vector<Tensors>& microbatches,
      const Pipeline::Loss& loss);

  void run();

  std::vector<torch::Tensor> losses;  // training
  std::vector<Tensors> outputs;       // evaluation
  std::vector<int32_t> peak_stored;   // by this rank's stages

 private:
  // One microbatch at one stage.
  struct Slot {
    Tensors handed;  // inputs, or gradients of outputs, from this rank
    TupleShape inputs;
    TupleShape outputs;
    StageGraph graph;
    bool forward_done = false;
  };

  Slot& slot(int32_t stage, int32_t microbatch);
  Expected expect(const Transfer& transfer);
  bool headed() const;

  void forward(const PlannedAction& planned);
  Tensors inputs_of(const PlannedAction& planned, Slot& slot);
  Tensors run_layers(const PipelineStage& stage, Tensors tensors) const;
  void keep_loss(const PlannedAction& planned, Slot& slot, const Tensors& outs);
  void give_outputs(
      const PlannedAction& planned, Slot& slot, const Tensors& outputs);
  TupleShape known_outputs(const Action& action, const TupleShape& shape);

  void backward(const PlannedAction& planned);
  Tensors gradients_for(const PlannedAction& planned, Slot& slot);
  void
  give_gradients(const PlannedAction& planned, Slot& slot, Tensors gradients);
  void count(int32_t stage, int32_t change);

  const Setting& setting_;
  const TransferPlan& plan_;
  LearntShapes& learnt_;
  const bool training_;
  const std::vector<Tensors>& microbatches_;
  const Pipeline::Loss& loss_;
  std::vector<std::vector<Slot>> slots_;  // by local stage, microbatch
  std::vector<int32_t> stored_;
  Transfers transfers_;
};

}  // namespace echelon::pipeline
