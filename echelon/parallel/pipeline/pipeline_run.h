// Runs the planned actions of one call of the pipeline on one rank.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/parallel/pipeline/pipeline.h"
#include "echelon/parallel/pipeline/stage_graph.h"
#include "echelon/parallel/pipeline/transfers.h"
#include "echelon/parallel/pipeline/tuple_shape.h"

namespace echelon::pipeline {

/// The shapes that the microbatches lead to at this rank's stages.
struct RecordedShapes {
  struct Stage {
    std::vector<TupleShape> inputs;  // by microbatch
    std::vector<TupleShape> outputs;
  };
  std::vector<Stage> stages;  // of this rank
  bool complete = false;      // a call has filled them
};

/// State of the pipeline that calls share.
struct RunContext {
  const Group& group;
  const PipelineOptions& options;
  const std::vector<PipelineStage>& stages;
  int32_t num_stages = 0;
  std::vector<std::string> last_layers;  // by stage of the pipeline
  /// By stage of the pipeline: index into `stages`; -1: on another rank.
  std::vector<int32_t> local;

  size_t local_index(int32_t stage) const {
    return static_cast<size_t>(local[static_cast<size_t>(stage)]);
  }
};

class PipelineRun {
 public:
  PipelineRun(
      const RunContext& context, const TransferPlan& plan,
      RecordedShapes& recorded, bool training,
      const std::vector<Tensors>& microbatches, const Pipeline::Loss& loss);

  void run();

  std::vector<torch::Tensor> losses;  // training
  std::vector<Tensors> outputs;       // evaluation
  std::vector<int32_t> peak_stored;   // by this rank's stages

 private:
  // The state of one microbatch at one stage.
  struct Slot {
    Tensors local_inputs;  // from a stage of this rank: inputs, later gradients
    TupleShape inputs;
    TupleShape outputs;
    StageGraph graph;
    bool forward_done = false;
  };

  Slot& slot(int32_t stage, int32_t microbatch);
  Expected expect(const Transfer& transfer);
  bool sends_headers() const;

  void forward(const PlannedAction& planned);
  Tensors inputs_of(const PlannedAction& planned, Slot& slot);
  Tensors run_layers(const PipelineStage& stage, Tensors tensors) const;
  void keep_loss(const PlannedAction& planned, Slot& slot, const Tensors& outs);
  void pass_outputs(
      const PlannedAction& planned, Slot& slot, const Tensors& outputs);
  std::string end_of_stage(int32_t stage) const;
  TupleShape recorded_outputs(const Action& action, const TupleShape& shape);

  void backward(const PlannedAction& planned);
  Tensors gradients_for(const PlannedAction& planned, Slot& slot);
  void
  pass_gradients(const PlannedAction& planned, Slot& slot, Tensors gradients);
  void count(int32_t stage, int32_t change);

  const RunContext& context_;
  const TransferPlan& plan_;
  RecordedShapes& recorded_;
  const bool training_;
  const std::vector<Tensors>& microbatches_;
  const Pipeline::Loss& loss_;
  std::vector<std::vector<Slot>> slots_;  // by local stage, microbatch
  std::vector<int32_t> stored_;
  Transfers transfers_;
};

}  // namespace echelon::pipeline
