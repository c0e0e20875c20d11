// One run executes the list of actions of this rank in order. Each microbatch
// has a slot for each local stage, which holds what forward leaves to backward:
// the graph, the shapes, and tensors that pass between two stages of this rank.
// The first run with given microbatch shapes sends a header with each tuple and
// records the shapes; later runs post their receives from the record.
#include "echelon/parallel/pipeline/pipeline_run.h"

#include <ATen/DeviceAccelerator.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::pipeline {
namespace {

timeline::SpanKind kind_of(const Action& action, bool training) {
  if (!training) return timeline::SpanKind::evaluation;
  return action.kind == ActionKind::forward ? timeline::SpanKind::forward
                                            : timeline::SpanKind::backward;
}

}  // namespace

PipelineRun::PipelineRun(
    const RunContext& context, const TransferPlan& plan,
    RecordedShapes& recorded, bool training,
    const std::vector<Tensors>& microbatches, const Pipeline::Loss& loss)
    : peak_stored(context.stages.size()),
      context_(context),
      plan_(plan),
      recorded_(recorded),
      training_(training),
      microbatches_(microbatches),
      loss_(loss),
      slots_(context.stages.size()),
      stored_(context.stages.size()),
      transfers_(
          context.group, plan,
          {.device = context.options.device,
           .recorder = context.options.recorder,
           .ahead = context.options.receives_ahead,
           .in_order =
               context.options.messages_in_order ||
               at::accelerator::isAccelerator(context.options.device.type()),
           .expect = [this](const Transfer& t) { return expect(t); }}) {
  const auto num_microbatches = static_cast<size_t>(plan.num_microbatches);
  for (auto& slots : slots_) slots.resize(num_microbatches);
  recorded_.stages.resize(context.stages.size());
  for (auto& stage : recorded_.stages) {
    stage.inputs.resize(num_microbatches);
    stage.outputs.resize(num_microbatches);
  }
  if (context.local.back() < 0) return;
  (training ? losses.resize(num_microbatches)
            : outputs.resize(num_microbatches));
}

void PipelineRun::run() {
  torch::AutoGradMode with_graph(training_);
  for (const auto& planned : plan_.actions) {
    transfers_.advance();
    if (planned.action.kind == ActionKind::forward) {
      forward(planned);
    } else {
      backward(planned);
    }
  }
  transfers_.finish();
  recorded_.complete = true;
}

PipelineRun::Slot& PipelineRun::slot(int32_t stage, int32_t microbatch) {
  return slots_[context_.local_index(stage)][static_cast<size_t>(microbatch)];
}

bool PipelineRun::sends_headers() const {
  return !recorded_.complete || context_.options.shapes_vary;
}

Expected PipelineRun::expect(const Transfer& transfer) {
  const Action& made = transfer.producer;
  if (transfer.backward()) {
    const Slot& ours = slot(made.stage - 1, made.microbatch);
    if (!ours.forward_done) return {};
    return {Expected::Kind::shape, gradients_of(ours.outputs)};
  }
  if (sends_headers()) return {Expected::Kind::headed, {}};
  return {
      Expected::Kind::shape,
      recorded_.stages[context_.local_index(made.stage + 1)]
          .inputs[static_cast<size_t>(made.microbatch)]};
}

void PipelineRun::count(int32_t stage, int32_t change) {
  const auto local = context_.local_index(stage);
  stored_[local] += change;
  peak_stored[local] = std::max(peak_stored[local], stored_[local]);
}

// Forward ---------------------------------------------------------------------

Tensors PipelineRun::inputs_of(const PlannedAction& planned, Slot& slot) {
  const auto microbatch = static_cast<size_t>(planned.action.microbatch);
  if (planned.action.stage == 0) {
    slot.inputs = shape_of(microbatches_[microbatch], "the microbatch");
    for (auto& input : slot.inputs) input.requires_grad = false;
    return microbatches_[microbatch];
  }
  if (planned.from_here) return std::move(slot.local_inputs);
  Tensors inputs = transfers_.take(planned.incoming, slot.inputs);
  recorded_.stages[context_.local_index(planned.action.stage)]
      .inputs[microbatch] = slot.inputs;
  return inputs;
}

void PipelineRun::forward(const PlannedAction& planned) {
  const Action& action = planned.action;
  Slot& slot = this->slot(action.stage, action.microbatch);
  const auto& stage = context_.stages[context_.local_index(action.stage)];
  Tensors tensors = inputs_of(planned, slot);
  timeline::ScopedSpan span(
      context_.options.recorder, "compute", to_string(action),
      kind_of(action, training_));
  if (training_) {
    count(action.stage, 1);
    tensors = slot.graph.track(tensors, slot.inputs);
  }
  tensors = run_layers(stage, std::move(tensors));
  if (action.stage + 1 < context_.num_stages) {
    pass_outputs(planned, slot, tensors);
  } else if (training_) {
    keep_loss(planned, slot, tensors);
  } else {
    outputs[static_cast<size_t>(action.microbatch)] = std::move(tensors);
  }
  slot.forward_done = true;
}

Tensors
PipelineRun::run_layers(const PipelineStage& stage, Tensors tensors) const {
  std::string giver =
      stage.stage == 0
          ? ""
          : context_.last_layers[static_cast<size_t>(stage.stage) - 1];
  for (const auto& layer : stage.layers) {
    tensors = run_layer(layer.name, layer.forward, tensors, giver);
    giver = layer.name;
  }
  return tensors;
}

void PipelineRun::keep_loss(
    const PlannedAction& planned, Slot& slot, const Tensors& outs) {
  const int32_t microbatch = planned.action.microbatch;
  const torch::Tensor loss = loss_(outs, microbatch);
  if (!loss.defined() || loss.numel() != 1 || !loss.requires_grad()) {
    throw ConfigError(format(
        "the loss of microbatch {} is {}; it must be one number that depends "
        "on a parameter",
        microbatch, loss.defined() ? describe(Tensors{loss}) : "undefined"));
  }
  slot.graph.set_outputs({loss});
  // Backward of the last stage begins with d loss / d loss.
  slot.local_inputs = {torch::ones_like(loss)};
  losses[static_cast<size_t>(microbatch)] = loss.detach();
}

void PipelineRun::pass_outputs(
    const PlannedAction& planned, Slot& slot, const Tensors& outputs) {
  const Action& action = planned.action;
  slot.outputs =
      recorded_outputs(action, shape_of(outputs, end_of_stage(action.stage)));
  if (training_) slot.graph.set_outputs(outputs);
  if (planned.to_here) {
    Slot& next = this->slot(action.stage + 1, action.microbatch);
    next.inputs = slot.outputs;
    for (const auto& output : outputs)
      next.local_inputs.push_back(output.detach());
  } else {
    transfers_.send(planned.outgoing, outputs, slot.outputs, sends_headers());
  }
}

std::string PipelineRun::end_of_stage(int32_t stage) const {
  const auto& layers = context_.stages[context_.local_index(stage)].layers;
  return format("layer \"{}\", the end of stage {}", layers.back().name, stage);
}

// The outputs' shapes as the next stage knows them: with the strides that it
// has recorded, or that the header of this message tells it.
TupleShape
PipelineRun::recorded_outputs(const Action& action, const TupleShape& shape) {
  auto& recorded = recorded_.stages[context_.local_index(action.stage)]
                       .outputs[static_cast<size_t>(action.microbatch)];
  if (sends_headers()) recorded = shape;
  if (recorded != shape) {
    throw ConfigError(format(
        "{}, gives {} for microbatch {} and gave {} before for microbatches of "
        "the same shapes ({}); set shapes_vary if that is meant",
        end_of_stage(action.stage), to_text(shape), action.microbatch,
        to_text(recorded),
        to_text(recorded) == to_text(shape)
            ? "what requires a gradient has changed"
            : format("stage {} expects that", action.stage + 1)));
  }
  return recorded;
}

// Backward --------------------------------------------------------------------

// Returns a gradient for each output that requires one.
Tensors PipelineRun::gradients_for(const PlannedAction& planned, Slot& slot) {
  if (planned.incoming < 0) return std::move(slot.local_inputs);
  TupleShape shape;
  return transfers_.take(planned.incoming, shape);
}

void PipelineRun::backward(const PlannedAction& planned) {
  const Action& action = planned.action;
  Slot& slot = this->slot(action.stage, action.microbatch);
  const bool inputs_only = action.kind == ActionKind::backward_input;
  const bool weights_only = action.kind == ActionKind::backward_weight;
  Tensors gradients;
  if (!weights_only) gradients = gradients_for(planned, slot);
  if (!inputs_only && context_.options.before_gradients) {
    context_.options.before_gradients(action.stage, planned.last_backward);
  }
  timeline::ScopedSpan span(
      context_.options.recorder, "compute", to_string(action),
      kind_of(action, true));
  if (weights_only) {
    slot.graph.backward_weight();
  } else {
    pass_gradients(
        planned, slot,
        inputs_only ? slot.graph.backward_input(gradients)
                    : slot.graph.backward(gradients));
  }
  // What forward kept is freed only when the weights have their gradients.
  if (!inputs_only) count(action.stage, -1);
}

void PipelineRun::pass_gradients(
    const PlannedAction& planned, Slot& slot, Tensors gradients) {
  const Action& action = planned.action;
  if (action.stage == 0) return;
  if (planned.to_here) {
    this->slot(action.stage - 1, action.microbatch).local_inputs =
        std::move(gradients);
    return;
  }
  const TupleShape shape = gradients_of(slot.inputs);
  for (size_t i = 0; i < gradients.size(); ++i) {
    // The stage before waits for a gradient of each output that requires one,
    // used or not.
    if (gradients[i].defined()) continue;
    gradients[i] = empty_like({shape[i]}, context_.options.device)[0].zero_();
  }
  transfers_.send(planned.outgoing, gradients, shape, false);
}

}  // namespace echelon::pipeline
