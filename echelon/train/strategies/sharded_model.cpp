// The whole list of layers on every rank, each layer cut over the ranks of
// dp_shard (and, as in data_parallel_model.cpp, over those of a tensor-parallel
// group).
#include <string>

#include "echelon/text/units.h"
#include "echelon/train/strategies/count_memory.h"
#include "echelon/train/strategies/parallel_model.h"
#include "echelon/train/strategies/passes.h"
#include "echelon/train/strategies/rank_layers.h"

namespace echelon {
namespace {

class ShardedModel : public ParallelModel {
 public:
  ShardedModel(const Job& job, const ModelPlace& place)
      : accumulate_(job.train.accumulate),
        dtype_(compute_dtype(job)),
        device_(place.world.device()),
        recorder_(place.recorder),
        names_(place.source.layers.names()),
        tensor_(tensor_parallel(job, place.groups)),
        shard_(place.groups.along(Axis::dp_shard)),
        data_(place.groups.data()),
        objective_(
            objective_for(place.source.sample, place.source.classes, tensor_)),
        layers_(
            job, place, place.source.cut(tensor_),
            {.slices = {{0, names_.size()}},
             .gather_once = gathers_once(job, place.source)}),
        network_(layers_.networks().front()),
        counted_(layers_.parts(), tensor_.rank()) {
    describe(job, place);
  }

  Score forward_backward(const Batch& raw, bool count_units) override {
    const Batch batch = objective_->prepared(raw, device_, dtype_);
    const double scale =
        loss_scale(*objective_, batch, data_, count_units) * gradient_scale_;
    auto& units = *layers_.units();
    layers_.sync_buffers();
    const Passes passes{
        .objective = *objective_,
        .count = accumulate_,
        .recorder = recorder_,
        .forward =
            [&](const Tensors& inputs) { return network_->forward(inputs); },
        .before_backward =
            [&](bool last) { units.begin_backward({.last = last}); }};
    const Score score = passes.run(batch, scale);
    units.finish();
    return counted_here() ? score : Score{};
  }

  Score evaluate(const Batch& raw) override {
    const torch::NoGradGuard no_grad;
    const Batch batch = objective_->prepared(raw, device_, dtype_);
    const bool empty = batch.inputs.size(0) == 0;
    const Tensors inputs = inputs_of(batch);
    network_->eval();
    const auto outputs = network_->forward(empty ? stand_in(inputs) : inputs);
    network_->train();
    Score score;
    if (!empty) objective_->evaluate(score, outputs, batch.targets);
    return counted_here() ? score : Score{};
  }

  std::optional<NonFinite> find_nonfinite(const Batch& raw) override {
    const Batch batch = objective_->prepared(raw, device_, dtype_);
    const auto found = network_->first_nonfinite_layer(inputs_of(batch));
    return earliest(found, names_, tensor_.group, device_);
  }

  std::vector<ParameterPart> parts() const override { return layers_.parts(); }
  std::vector<ParameterPart> buffers() const override {
    return layers_.buffers();
  }
  std::vector<ParameterGroup>
  optimizer_groups(double weight_decay) const override {
    return layers_.optimizer_groups(weight_decay);
  }
  void after_update(bool updated) override { layers_.after_update(updated); }
  void before_load() override { layers_.before_load(); }
  void after_load() override { layers_.after_load(); }

  std::optional<SharedOutGradients> shared_out_gradients() const override {
    return counted_.shared_out(
        gradients_of(parts()), sum_over({tensor_.group, shard_}, device_));
  }
  std::vector<std::string> describe() const override { return lines_; }

 private:
  // Ranks that compute each layer together have one score.
  bool counted_here() const { return tensor_.rank() == 0; }

  void describe(const Job& job, const ModelPlace& place) {
    if (shard_.size() == 1 && tensor_.size() == 1) return;
    const int64_t all = place.source.num_parameters();
    int64_t own = 0;
    for (const auto& part : parts()) own += part.value.numel();
    std::string line;
    if (shard_.size() > 1) {
      line = "sharded rank " + std::to_string(shard_.rank()) + " of " +
             std::to_string(shard_.size());
    }
    if (tensor_.size() > 1) {
      line += std::string(line.empty() ? "" : ", ") + "tensor-parallel rank " +
              std::to_string(tensor_.rank()) + " of " +
              std::to_string(tensor_.size());
    }
    lines_ = {
        line + ": " + std::to_string(own) + " of " + std::to_string(all) +
        " parameters, " +
        format_percent(static_cast<double>(own) / static_cast<double>(all))};
  }

  int64_t accumulate_;
  torch::Dtype dtype_;
  torch::Device device_;
  Recorder* recorder_;
  std::vector<std::string> names_;
  TensorParallel tensor_;
  Group shard_;
  Group data_;
  std::unique_ptr<Objective> objective_;
  RankLayers layers_;
  std::shared_ptr<Network> network_;
  CountedParts counted_;
  std::vector<std::string> lines_;
};

}  // namespace

std::unique_ptr<ParallelModel>
make_sharded_model(const Job& job, const ModelPlace& place) {
  auto model = std::make_unique<ShardedModel>(job, place);
  announce(place, model->describe());
  return model;
}

}  // namespace echelon
