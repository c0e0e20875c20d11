// A whole model in one process, on one device or several, data parallel over
// processes: what the two strategies share.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "echelon/parallel/tensor/shared_gradients.h"
#include "echelon/train/strategies/parallel_model.h"
#include "echelon/train/strategies/passes.h"

namespace echelon {

/// `Net` is a torch::nn::Module that maps inputs to scores, on whatever
/// devices: Network or PlacedNetwork. Networks of a tensor-parallel group hold
/// parts.
template <class Net>
class InProcessModel : public ParallelModel {
 public:
  /// `first` takes the inputs, `last` has the scores. `recorder`: for spans of
  /// forward and backward on the track "compute"; null when the network records
  /// its own.
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
        counted_(parameter_parts(*network_), tensor_.rank()),
        shared_(*network_, tensor_),
        parallel_(network_, place.groups.data(), data_parallel_options(job)) {}

  Score forward_backward(const Batch& raw, bool count_units) override {
    const Batch batch = placed(raw);
    const double scale =
        loss_scale(*objective_, batch, parallel_.group(), count_units) *
        gradient_scale_;
    const Passes passes{
        .objective = *objective_,
        .count = accumulate_,
        .recorder = recorder_,
        .around = [&](bool last) -> std::shared_ptr<void> {
          if (last) return nullptr;
          return std::shared_ptr<NoSync>(new NoSync(parallel_.no_sync()));
        },
        .forward =
            [&](const Tensors& inputs) { return parallel_.forward(inputs); }};
    const Score score = passes.run(batch, scale);
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

  std::vector<ParameterPart> parts() const override {
    return parameter_parts(*network_);
  }
  std::vector<ParameterPart> buffers() const override {
    return buffer_parts(*network_);
  }
  std::vector<ParameterGroup>
  optimizer_groups(double weight_decay) const override {
    NamedTensors all;
    for (const auto& item : network_->named_parameters()) {
      all.emplace_back(item.key(), item.value());
    }
    return parameter_groups(all, weight_decay);
  }
  std::optional<SharedOutGradients> shared_out_gradients() const override {
    if (tensor_.size() == 1) return std::nullopt;
    return counted_.shared_out(
        gradients_of(parts()), sum_over({tensor_.group}, last_));
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
  std::vector<std::string> layers_;  // of the whole model
  TensorParallel tensor_;
  std::unique_ptr<Objective> objective_;
  std::shared_ptr<Net> network_;
  CountedParts counted_;
  SharedGradients shared_;
  DistributedDataParallel<std::shared_ptr<Net>> parallel_;
};

}  // namespace echelon
