// Fully sharded data parallelism: every rank has all layers, each sharded over
// dp_shard (and over a tensor-parallel group, as in in_process_model.cpp).
#include <string>

#include "echelon/train/strategies/count_job.h"
#include "echelon/train/strategies/parallel_model.h"
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
        shard_(place.groups.expert_shard()),
        data_(place.groups.data()),
        objective_(objective_on(job, place, tensor_)),
        layers_(
            job, place, place.source.sharded(tensor_),
            {.slices = {{0, names_.size()}},
             .unshard_once = unshards_once(job, place.source)}),
        network_(layers_.networks().front()),
        counted_(
            layers_.parameters(), tensor_.rank(),
            counted_elsewhere(layers_.parameters(), place.groups)) {
    lines_ = describe_share(place, parameters());
  }

  Score forward_backward(const Batch& raw, bool count_units) override {
    const Batch batch = objective_.prepared(raw, device_, dtype_);
    const auto scale = loss_scale(objective_, batch, data_, count_units)
                           .times(gradient_scale_);
    auto& units = *layers_.units();
    layers_.sync_buffers();
    const MicrobatchLoop loop{
        .objective = objective_,
        .num_microbatches = accumulate_,
        .recorder = recorder_,
        .forward =
            [&](const Tensors& inputs) { return network_->forward(inputs); },
        .before_backward =
            [&](bool last) { units.begin_backward({.last = last}); }};
    const Score score = loop.run(batch, scale);
    units.finish();
    layers_.routers().finish();
    return counted_here() ? score : Score{};
  }

  Score evaluate(const Batch& raw) override {
    const torch::NoGradGuard no_grad;
    const Batch batch = objective_.prepared(raw, device_, dtype_);
    const bool empty = batch.inputs.size(0) == 0;
    const Tensors inputs = inputs_of(batch);
    network_->eval();
    const auto outputs = network_->forward(empty ? stand_in(inputs) : inputs);
    network_->train();
    Score score;
    score_batch(objective_, score, outputs, batch, empty);
    return counted_here() ? score : Score{};
  }

  std::optional<NonFinite> find_nonfinite(const Batch& raw) override {
    const Batch batch = objective_.prepared(raw, device_, dtype_);
    const auto found = network_->first_nonfinite_layer(inputs_of(batch));
    return earliest(
        earliest(found, names_, tensor_.group, device_), names_,
        tensor_.context.group, device_);
  }

  std::vector<LocalParameter> parameters() const override {
    return layers_.parameters();
  }
  std::vector<LocalParameter> buffers() const override {
    return layers_.buffers();
  }
  std::vector<ParameterGroup>
  optimizer_groups(double weight_decay) const override {
    return layers_.optimizer_groups(weight_decay);
  }
  void after_update(bool updated) override { layers_.after_update(updated); }
  void before_load() override { layers_.before_load(); }
  void after_load() override { layers_.after_load(); }

  std::optional<PartitionedGradients> partitioned_gradients() const override {
    return counted_.partition(
        parameters(),
        sum_over({tensor_.group, shard_, tensor_.experts}, device_));
  }
  torch::Tensor expert_counts() const override {
    return counted_once(layers_.routers(), counted_here());
  }
  std::vector<std::string> describe() const override { return lines_; }

 private:
  // One rank of a tensor-parallel group counts their score.
  bool counted_here() const { return tensor_.rank() == 0; }

  int64_t accumulate_;
  torch::Dtype dtype_;
  torch::Device device_;
  timeline::Recorder* recorder_;
  std::vector<std::string> names_;
  TensorParallel tensor_;
  Group shard_;
  Group data_;
  TrainingObjective objective_;
  RankLayers layers_;
  std::shared_ptr<Network> network_;
  CountedElements counted_;
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
