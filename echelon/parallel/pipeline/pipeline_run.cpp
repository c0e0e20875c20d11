#include "echelon/parallel/pipeline/pipeline_run.h"

#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>

#include "echelon/error.h"

namespace echelon::pipeline {
namespace {

std::string quoted(const std::string& name) {
  return "\"" + name + "\"";
}

SpanKind kind_of(const Action& action, bool training) {
  if (!training) return SpanKind::evaluation;
  return action.kind == ActionKind::forward ? SpanKind::forward
                                            : SpanKind::backward;
}

}  // namespace

PipelineRun::PipelineRun(
    const Setting& setting, const TransferPlan& plan, LearntShapes& learnt,
    bool training, const std::vector<Tensors>& microbatches,
    const Pipeline::Loss& loss)
    : peak_stored(setting.stages.size()),
      setting_(setting),
      plan_(plan),
      learnt_(learnt),
      training_(training),
      microbatches_(microbatches),
      loss_(loss),
      slots_(setting.stages.size()),
      stored_(setting.stages.size()),
      transfers_(
          setting.group, plan,
          {.device = setting.options.device,
           .recorder = setting.options.recorder,
           .ahead = setting.options.receives_ahead,
           .in_order = setting.options.messages_in_order ||
                       setting.options.device.is_cuda(),
           .expect = [this](const Transfer& t) { return expect(t); }}) {
  const auto num_microbatches = static_cast<size_t>(plan.num_microbatches);
  for (auto& slots : slots_) slots.resize(num_microbatches);
  learnt_.stages.resize(setting.stages.size());
  for (auto& stage : learnt_.stages) {
    stage.inputs.resize(num_microbatches);
    stage.outputs.resize(num_microbatches);
  }
  if (setting.local.back() < 0) return;
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
  learnt_.complete = true;
}

PipelineRun::Slot& PipelineRun::slot(int32_t stage, int32_t microbatch) {
  const auto local = static_cast<size_t>(setting_.local[stage]);
  return slots_[local][static_cast<size_t>(microbatch)];
}

bool PipelineRun::headed() const {
  return !learnt_.complete || setting_.options.shapes_vary;
}

Expected PipelineRun::expect(const Transfer& transfer) {
  const Action& made = transfer.producer;
  if (transfer.backward()) {
    const Slot& ours = slot(made.stage - 1, made.microbatch);
    if (!ours.forward_done) return {};
    return {Expected::Kind::shape, gradients_of(ours.outputs)};
  }
  if (headed()) return {Expected::Kind::headed, {}};
  const auto local = static_cast<size_t>(setting_.local[made.stage + 1]);
  return {
      Expected::Kind::shape,
      learnt_.stages[local].inputs[static_cast<size_t>(made.microbatch)]};
}

void PipelineRun::count(int32_t stage, int32_t change) {
  const auto local = static_cast<size_t>(setting_.local[stage]);
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
  if (planned.from_here) return std::move(slot.handed);
  Tensors inputs = transfers_.take(planned.incoming, slot.inputs);
  const auto local = static_cast<size_t>(setting_.local[planned.action.stage]);
  learnt_.stages[local].inputs[microbatch] = slot.inputs;
  return inputs;
}

void PipelineRun::forward(const PlannedAction& planned) {
  const Action& action = planned.action;
  Slot& slot = this->slot(action.stage, action.microbatch);
  const auto& stage =
      setting_.stages[static_cast<size_t>(setting_.local[action.stage])];
  Tensors tensors = inputs_of(planned, slot);
  ScopedSpan span(
      setting_.options.recorder, "compute", to_string(action),
      kind_of(action, training_));
  if (training_) {
    count(action.stage, 1);
    tensors = slot.graph.track(tensors, slot.inputs);
  }
  tensors = run_layers(stage, std::move(tensors));
  if (action.stage + 1 < setting_.num_stages) {
    give_outputs(planned, slot, tensors);
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
          : setting_.last_layers[static_cast<size_t>(stage.stage) - 1];
  for (const auto& [name, layer] : stage.layers) {
    tensors = run_layer(name, layer.forward, tensors, giver);
    giver = name;
  }
  return tensors;
}

void PipelineRun::keep_loss(
    const PlannedAction& planned, Slot& slot, const Tensors& outs) {
  const int32_t microbatch = planned.action.microbatch;
  const torch::Tensor loss = loss_(outs, microbatch);
  if (!loss.defined() || loss.numel() != 1 || !loss.requires_grad()) {
    throw ConfigError(
        "the loss of microbatch " + std::to_string(microbatch) + " is " +
        (loss.defined() ? describe(Tensors{loss}) : "undefined") +
        "; it must be one number that depends on a parameter");
  }
  slot.graph.set_outputs({loss});
  slot.handed = {torch::ones_like(loss)};
  losses[static_cast<size_t>(microbatch)] = loss.detach();
}

void PipelineRun::give_outputs(
    const PlannedAction& planned, Slot& slot, const Tensors& outputs) {
  const Action& action = planned.action;
  const auto local = static_cast<size_t>(setting_.local[action.stage]);
  slot.outputs = known_outputs(
      action, shape_of(
                  outputs,
                  "layer " + quoted(setting_.stages[local].layers.back().name) +
                      ", the end of stage " + std::to_string(action.stage)));
  if (training_) slot.graph.set_outputs(outputs);
  if (planned.to_here) {
    Slot& next = this->slot(action.stage + 1, action.microbatch);
    next.inputs = slot.outputs;
    for (const auto& output : outputs) next.handed.push_back(output.detach());
  } else {
    transfers_.send(planned.outgoing, outputs, slot.outputs, headed());
  }
}

// As the next stage knows them: with the strides that it has learnt, or will by
// this message's header.
TupleShape
PipelineRun::known_outputs(const Action& action, const TupleShape& shape) {
  const auto local = static_cast<size_t>(setting_.local[action.stage]);
  auto& learnt =
      learnt_.stages[local].outputs[static_cast<size_t>(action.microbatch)];
  if (!headed() && learnt != shape) {
    throw ConfigError(
        "layer " + quoted(setting_.stages[local].layers.back().name) +
        ", the end of stage " + std::to_string(action.stage) + ", gives " +
        to_text(shape) + " for microbatch " +
        std::to_string(action.microbatch) + " and gave " + to_text(learnt) +
        " before for microbatches of the same shapes (" +
        (to_text(learnt) == to_text(shape)
             ? "what requires a gradient has changed"
             : "stage " + std::to_string(action.stage + 1) + " expects that") +
        "); set shapes_vary if that is meant");
  }
  if (headed()) learnt = shape;
  return learnt;
}

// Backward --------------------------------------------------------------------

// One for each output that requires a gradient.
Tensors PipelineRun::gradients_for(const PlannedAction& planned, Slot& slot) {
  if (planned.incoming < 0) return std::move(slot.handed);
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
  if (!inputs_only && setting_.options.before_gradients) {
    setting_.options.before_gradients(action.stage, planned.last_backward);
  }
  ScopedSpan span(
      setting_.options.recorder, "compute", to_string(action),
      kind_of(action, true));
  if (weights_only) {
    slot.graph.backward_weight();
  } else {
    give_gradients(
        planned, slot,
        inputs_only ? slot.graph.backward_input(gradients)
                    : slot.graph.backward(gradients));
  }
  if (!inputs_only) count(action.stage, -1);
}

void PipelineRun::give_gradients(
    const PlannedAction& planned, Slot& slot, Tensors gradients) {
  const Action& action = planned.action;
  if (action.stage == 0) return;
  if (planned.to_here) {
    this->slot(action.stage - 1, action.microbatch).handed =
        std::move(gradients);
    return;
  }
  const TupleShape shape = gradients_of(slot.inputs);
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].defined()) continue;
    gradients[i] = empty_like({shape[i]}, setting_.options.device)[0].zero_();
  }
  transfers_.send(planned.outgoing, gradients, shape, false);
}

}  // namespace echelon::pipeline
