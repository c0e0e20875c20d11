// A model with all its layers in one process, on one device or several, and
// data parallel over processes: shared by data_parallel_model.cpp and
// placed_model.cpp.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "echelon/parallel/tensor/shared_gradients.h"
#include "echelon/train/strategies/microbatch_loop.h"
#include "echelon/train/strategies/parallel_model.h"

namespace echelon {

/// `Net` is a torch::nn::Module that maps inputs to scores, on any devices:
/// Network or PlacedNetwork. Networks of a tensor-parallel group hold shards.
template <class Net>
class InProcessModel : public ParallelModel {
 public:
  /// Device `first` takes the inputs, `last` has the scores. `recorder` gets
  /// the spans of forward and backward on the track "compute"; null when the
  /// network records its own.
  InProcessModel(
      const Job& job, const ModelPlace& place, std::shared_ptr<Net> network,
      torch::Device first, torch::Device last, Recorder* recorder)
      : accumulate_(job.train.accumulate),
        dtype_(dtype_of(job.model.dtype)),
        first_(first),
        last_(last),
        recorder_(recorder),
        layers_(place.source.layers.names()),
        tensor_(tensor_parallel(job, place.groups)),
        objective_(
            objective_for(place.source.sample, place.source.classes, tensor_)),
        network_(std::move(network)),
        counted_(local_parameters(*network_), tensor_.rank()),
        shared_(*network_, tensor_),
        parallel_(network_, place.groups.data(), data_parallel_options(job)) {}

  Score forward_backward(const Batch& raw, bool count_units) override {
    const Batch batch = placed(raw);
    const double scale =
        loss_scale(*objective_, batch, parallel_.group(), count_units) *
        gradient_scale_;
    const MicrobatchLoop loop{
        .objective = *objective_,
        .num_microbatches = accumulate_,
        .recorder = recorder_,
        .around = [&](bool last) -> std::shared_ptr<void> {
          return last ? nullptr : parallel_.no_sync();
        },
        .forward =
            [&](const Tensors& inputs) { return parallel_.forward(inputs); }};
    const Score score = loop.run(batch, scale);
    shared_.finish();
    return counted_here() ? score : Score{};
  }

  Score evaluate(const Batch& raw) override {
    const torch::NoGradGuard no_grad;
    const Batch batch = placed(raw);
    Score score;
    if (batch.inputs.size(0) == 0) return score;
    network_->eval();
    const auto outputs = network_->forward(inputs_of(batch));
    network_->train();
    objective_->evaluate(score, outputs, batch.targets);
    return counted_here() ? score : Score{};
  }

  std::optional<NonFinite> find_nonfinite(const Batch& raw) override {
    return earliest(
        network_->first_nonfinite_layer(inputs_of(placed(raw))), layers_,
        tensor_.group, first_);
  }

  std::vector<LocalParameter> parameters() const override {
    return local_parameters(*network_);
  }
  std::vector<LocalParameter> buffers() const override {
    return local_buffers(*network_);
  }
  std::vector<ParameterGroup>
  optimizer_groups(double weight_decay) const override {
    NamedTensors all;
    for (const auto& item : network_->named_parameters()) {
      all.emplace_back(item.key(), item.value());
    }
    return parameter_groups(all, weight_decay);
  }
  std::optional<PartitionedGradients> partitioned_gradients() const override {
    if (tensor_.size() == 1) return std::nullopt;
    return counted_.shared_out(
        gradients_of(parameters()), sum_over({tensor_.group}, last_));
  }

 private:
  // Ranks that compute each layer together have one score.
  bool counted_here() const { return tensor_.rank() == 0; }

  Batch placed(const Batch& raw) const {
    Batch batch = objective_->prepared(raw, first_, dtype_);
    batch.targets = batch.targets.to(last_, /*non_blocking=*/true);
    return batch;
  }

  int64_t accumulate_;
  torch::Dtype dtype_;
  torch::Device first_;
  torch::Device last_;
  Recorder* recorder_;
  std::vector<std::string> layers_;  // names
  TensorParallel tensor_;
  std::unique_ptr<TrainingObjective> objective_;
  std::shared_ptr<Net> network_;
  CountedElements counted_;
  SharedGradients shared_;
  DistributedDataParallel<std::shared_ptr<Net>> parallel_;
};

}  // namespace echelon
