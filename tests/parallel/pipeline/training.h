// One training loop for one device and for a pipeline.
#pragma once

#include <torch/torch.h>

#include <string>
#include <utility>
#include <vector>

#include "echelon/comm/world.h"
#include "echelon/parallel/pipeline/pipeline.h"
#include "tests/parallel/pipeline/nets.h"
#include "tests/support/parity.h"

namespace echelon::training {

using torch::Tensor;

struct Plan {
  int steps = 3;
  int32_t microbatches = 5;
  int64_t rows = 3;       // of a microbatch
  bool uneven = false;    // the last one is smaller
  bool growing = false;   // rows change from step to step, and back
  bool evaluate = false;  // between the steps
};

inline int64_t rows_of(const Plan& plan, int step, int32_t microbatch) {
  const int64_t rows = plan.rows + (plan.growing ? step % 2 : 0);
  return plan.uneven && microbatch + 1 == plan.microbatches ? rows - 1 : rows;
}

inline std::vector<Tensors> batch_of(const Plan& plan, int step) {
  std::vector<Tensors> batch;
  for (int32_t m = 0; m < plan.microbatches; ++m) {
    batch.push_back({parity::random(
        {rows_of(plan, step, m), 6}, 1000 * static_cast<uint64_t>(step) + m)});
  }
  return batch;
}

inline Pipeline::Loss loss_of(const Plan& plan, int step) {
  int64_t samples = 0;
  for (int32_t m = 0; m < plan.microbatches; ++m) {
    samples += rows_of(plan, step, m);
  }
  return [=](const Tensors& outputs, int64_t microbatch) {
    const Tensor target = parity::random(
        outputs[0].sizes(), 5000 + 1000 * static_cast<uint64_t>(step) +
                                static_cast<uint64_t>(microbatch));
    return (outputs[0] - target).square().sum() / static_cast<double>(samples);
  };
}

using Parameters = std::vector<std::pair<std::string, Tensor>>;

inline void update(const Parameters& parameters) {
  torch::NoGradGuard no_grad;
  for (const auto& [_, tensor] : parameters) {
    Tensor value = tensor;
    if (!value.grad().defined()) continue;
    value.sub_(value.grad() * 0.05);
    value.mutable_grad().reset();
  }
}

inline void
record_step(parity::Record& record, const Parameters& parameters, double loss) {
  parity::NamedTensors gradients;
  for (const auto& [name, tensor] : parameters) {
    gradients[name] = tensor.grad();
  }
  record.step(gradients, loss);
}

inline void record_end(parity::Record& record, const Parameters& parameters) {
  for (const auto& [name, tensor] : parameters) {
    record.parameters[name] = tensor.detach().clone();
  }
}

inline double sum_of(const std::vector<Tensor>& losses) {
  double sum = 0;
  for (const auto& loss : losses) sum += loss.item<double>();
  return sum;
}

inline Plan evaluation_of(const Plan& plan) {
  Plan other = plan;
  other.microbatches += 1;
  return other;
}

inline void record_evaluation(
    parity::Record& record, int step, const std::vector<Tensors>& outputs) {
  for (size_t m = 0; m < outputs.size(); ++m) {
    record.buffers
        ["evaluation " + std::to_string(step) + " " + std::to_string(m)] =
        outputs[m][0];
  }
}

/// Gradient accumulation over the microbatches.
inline parity::Record on_one_device(const LayerList& list, const Plan& plan) {
  const PipelineStage all = build_stage(list, 0, 0, list.size());
  auto parameters = all.named_parameters();
  std::map<std::string, Tensor> by_name(parameters.begin(), parameters.end());
  const auto tie = [&] {
    torch::NoGradGuard no_grad;
    for (const auto& tie : list.ties()) {
      by_name[tie.second].copy_(by_name[tie.first]);
    }
  };
  tie();
  parity::Record record;
  for (int step = 0; step < plan.steps; ++step) {
    const auto batch = batch_of(plan, step);
    const auto loss_function = loss_of(plan, step);
    std::vector<Tensor> losses;
    for (int32_t m = 0; m < plan.microbatches; ++m) {
      Tensors tensors = batch[static_cast<size_t>(m)];
      for (const auto& layer : all.layers) {
        tensors = layer.forward(tensors);
      }
      losses.push_back(loss_function(tensors, m));
      losses.back().backward();
    }
    std::map<std::string, Tensor> sums;
    for (const auto& tie : list.ties()) {
      auto& sum = sums[tie.first];
      if (!sum.defined()) sum = by_name[tie.first].grad().clone();
      sum += by_name[tie.second].grad();
    }
    for (const auto& tie : list.ties()) {
      by_name[tie.first].mutable_grad() = sums[tie.first].clone();
      by_name[tie.second].mutable_grad() = sums[tie.first].clone();
    }
    record_step(record, parameters, sum_of(losses));
    if (plan.evaluate) {
      torch::NoGradGuard no_grad;
      std::vector<Tensors> outputs = batch_of(evaluation_of(plan), step);
      for (auto& tensors : outputs) {
        for (const auto& layer : all.layers) {
          tensors = layer.forward(tensors);
        }
      }
      record_evaluation(record, step, outputs);
    }
    update(parameters);
  }
  record_end(record, parameters);
  return record;
}

/// A pipeline whose stages have nearly equal numbers of layers.
inline Pipeline make_pipeline(
    const LayerList& list, const Schedule& schedule, const Group& group,
    const PipelineOptions& options = {}) {
  return Pipeline(
      group, schedule,
      build_stages(
          list, partition_evenly(list, schedule.num_stages()),
          schedule.rank_of_stage, group.rank()),
      options);
}

/// The batch on the rank of stage 0, elsewhere nothing.
inline std::vector<Tensors>
batch_here(const Pipeline& pipeline, const Plan& plan, int step) {
  if (!pipeline.has_first_stage()) return {};
  return batch_of(plan, step);
}

inline PipelineResult run_step(Pipeline& pipeline, const Plan& plan, int step) {
  return pipeline.step(
      batch_here(pipeline, plan, step),
      pipeline.has_last_stage() ? loss_of(plan, step) : nullptr);
}

/// The same on this rank of a pipeline. The loss is 0 except on the rank of the
/// last stage.
inline parity::Record on_ranks(
    const LayerList& list, const Plan& plan, const Schedule& schedule,
    const Group& group, PipelineOptions options = {}) {
  options.ties = list.ties();
  options.copy_tied_values = true;
  Pipeline pipeline = make_pipeline(list, schedule, group, options);
  Parameters parameters;
  for (const auto& stage : pipeline.stages()) {
    for (auto& item : stage.named_parameters()) parameters.push_back(item);
  }
  parity::Record record;
  for (int step = 0; step < plan.steps; ++step) {
    const auto result = run_step(pipeline, plan, step);
    record_step(record, parameters, sum_of(result.losses));
    if (plan.evaluate) {
      record_evaluation(
          record, step,
          pipeline.evaluate(batch_here(pipeline, evaluation_of(plan), step)));
    }
    update(parameters);
  }
  record_end(record, parameters);
  return record;
}

/// Compares `part` with its share of `all`. The `last` rank also has losses and
/// outputs.
inline void expect_part(
    const parity::Record& all, const parity::Record& part, bool last,
    double tolerance) {
  parity::Record expected;
  const auto pick = [](const parity::NamedTensors& from,
                       const parity::NamedTensors& names) {
    parity::NamedTensors picked;
    for (const auto& [name, _] : names) picked[name] = from.at(name);
    return picked;
  };
  for (size_t step = 0; step < all.losses.size(); ++step) {
    expected.losses.push_back(last ? all.losses[step] : 0.0);
    expected.gradients.push_back(
        pick(all.gradients[step], part.gradients[step]));
  }
  expected.parameters = pick(all.parameters, part.parameters);
  if (last) expected.buffers = all.buffers;
  parity::expect_parity(expected, part, tolerance);
}

}  // namespace echelon::training
