// Models with all their layers in one process, on one device or several, and
// data parallel over processes. Each layer is complete or, on one device,
// sharded over a tensor-parallel group.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "echelon/models/mixture.h"
#include "echelon/models/weights.h"
#include "echelon/parallel/placement/placed_network.h"
#include "echelon/parallel/tensor/shared_gradients.h"
#include "echelon/train/strategies/model_partition.h"
#include "echelon/train/strategies/parallel_model.h"
#include "echelon/train/strategies/rank_layers.h"

namespace echelon {
namespace {

using placement::PlacedNetwork;
using placement::Placement;
using placement::PlacementOptions;

// `Net` is a torch::nn::Module that maps inputs to scores, on any devices:
// Network or PlacedNetwork. Networks of a tensor-parallel group hold shards.
template <class Net>
class InProcessModel : public ParallelModel {
 public:
  // Device `first` takes the inputs, `last` has the scores. `recorder` gets the
  // spans of forward and backward on the track "compute"; null when the network
  // records its own.
  InProcessModel(
      const Job& job, const ModelPlace& place, std::shared_ptr<Net> network,
      torch::Device first, torch::Device last, timeline::Recorder* recorder,
      std::vector<std::string> lines)
      : accumulate_(job.train.accumulate),
        dtype_(dtype_of(job.model.dtype)),
        first_(first),
        last_(last),
        recorder_(recorder),
        layers_(place.source.layers.names()),
        lines_(std::move(lines)),
        tensor_(tensor_parallel(job, place.groups)),
        objective_(objective_on(job, place, tensor_)),
        network_(std::move(network)),
        counted_(
            local_parameters(*network_), tensor_.rank(),
            counted_elsewhere(local_parameters(*network_), place.groups)),
        shared_(*network_, tensor_),
        parallel_(
            network_, place.groups.data(),
            without_experts(
                data_parallel_options(job.train, job.model.sync_batch_norm),
                place.groups)),
        experts_(
            *network_, place.groups,
            data_parallel_options(job.train, job.model.sync_batch_norm)),
        routers_(
            {network_}, language_shape(job, place.source), place.groups.data(),
            first_) {}

  Score forward_backward(const Batch& raw, bool count_units) override {
    const Batch batch = placed(raw);
    const auto scale =
        loss_scale(objective_, batch, parallel_.group(), count_units)
            .times(gradient_scale_);
    const MicrobatchLoop loop{
        .objective = objective_,
        .num_microbatches = accumulate_,
        .recorder = recorder_,
        .around = [&](bool last) -> std::shared_ptr<void> {
          return last ? nullptr : parallel_.no_sync();
        },
        .forward =
            [&](const Tensors& inputs) { return parallel_.forward(inputs); },
        .before_backward =
            [&](bool last) {
              if (last) experts_.begin_reduction();
            }};
    const auto step = experts_.begin_step();
    const Score score = loop.run(batch, scale);
    experts_.finish_reduction();
    shared_.finish();
    routers_.finish();
    return counted_here() ? score : Score{};
  }

  Score evaluate(const Batch& raw) override {
    const torch::NoGradGuard no_grad;
    const Batch batch = placed(raw);
    Score score;
    const bool empty = batch.inputs.size(0) == 0;
    // Other ranks send tokens to this one's experts, or compare samples.
    if (empty && tensor_.experts.size() == 1 &&
        !objective_.needs_whole_batch()) {
      return score;
    }
    const Tensors inputs = inputs_of(batch);
    network_->eval();
    const auto outputs = network_->forward(empty ? stand_in(inputs) : inputs);
    network_->train();
    score_batch(objective_, score, outputs, batch, empty);
    return counted_here() ? score : Score{};
  }

  std::optional<NonFinite> find_nonfinite(const Batch& raw) override {
    const auto found = earliest(
        network_->first_nonfinite_layer(inputs_of(placed(raw))), layers_,
        tensor_.group, first_);
    return earliest(found, layers_, tensor_.context.group, first_);
  }

  std::vector<LocalParameter> parameters() const override {
    return local_parameters(*network_);
  }
  std::vector<LocalParameter> buffers() const override {
    return local_buffers(*network_);
  }
  std::vector<ParameterGroup>
  optimizer_groups(double weight_decay) const override {
    return trained_groups(parameters(), weight_decay);
  }
  std::optional<PartitionedGradients> partitioned_gradients() const override {
    if (tensor_.size() == 1 && tensor_.experts.size() == 1) return std::nullopt;
    return counted_.partition(
        parameters(), sum_over({tensor_.group, tensor_.experts}, last_));
  }
  torch::Tensor expert_counts() const override {
    return counted_once(routers_, counted_here());
  }
  std::vector<std::string> describe() const override { return lines_; }

 private:
  // Ranks that compute each layer together have one score.
  bool counted_here() const { return tensor_.rank() == 0; }

  Batch placed(const Batch& raw) const {
    Batch batch = objective_.prepared(raw, first_, dtype_);
    batch.targets = batch.targets.to(last_, /*non_blocking=*/true);
    for (auto& tensor : batch.more_targets) {
      tensor = tensor.to(last_, /*non_blocking=*/true);
    }
    return batch;
  }

  int64_t accumulate_;
  torch::Dtype dtype_;
  torch::Device first_;
  torch::Device last_;
  timeline::Recorder* recorder_;
  std::vector<std::string> layers_;  // names
  std::vector<std::string> lines_;   // describe()
  TensorParallel tensor_;
  TrainingObjective objective_;
  std::shared_ptr<Net> network_;
  CountedElements counted_;
  SharedGradients shared_;
  DistributedDataParallel<std::shared_ptr<Net>> parallel_;
  ExpertParallel experts_;
  models::RouterSteps routers_;
};

PlacementOptions placement_options(const Job& job, const ModelPlace& place) {
  const int64_t pieces = job.layout.data_ranks() * job.train.accumulate;
  PlacementOptions options;
  for (const auto& name : job.model.devices) options.devices.emplace_back(name);
  options.inputs = input_specs(
      job, place.source, std::max<int64_t>(1, job.train.batch / pieces));
  options.balance = job.model.balance == StageBalance::memory
                        ? placement::Balance::memory
                        : placement::Balance::time;
  options.partition_at = job.model.partition_at;
  options.limits = job.model.device_bytes;
  options.optimizer_bytes =
      optimizer_copies(job.optimizer) *
      static_cast<int64_t>(c10::elementSize(dtype_of(job.model.dtype)));
  if (options.partition_at.empty() &&
      job.model.balance == StageBalance::measured) {
    options.partition_at = measured_partition(
        place.source.layers, options.inputs, options.devices.size(),
        place.world);
  }
  return options;
}

// The layers wrapped as [memory] says.
LayerList wrapped(const Job& job, const ModelSource& source) {
  const auto memory =
      layer_memory(job, source, {{0, source.layers.size()}}, /*in_flight=*/1);
  if (!memory) return source.layers;
  return with_forwards(
      source.layers,
      [memory = *memory](
          size_t number, const std::string& name, const BuiltLayer& layer) {
        return memory.wrap(number, name, layer.forward, layer.module);
      });
}

}  // namespace

std::unique_ptr<ParallelModel>
make_data_parallel_model(const Job& job, const ModelPlace& place) {
  const torch::Device device = place.world.device();
  const LayerList layers =
      place.source.sharded(tensor_parallel(job, place.groups));
  const auto network =
      RankLayers(job, place, layers, {.slices = {{0, layers.size()}}})
          .networks()
          .front();
  auto model = std::make_unique<InProcessModel<Network>>(
      job, place, network, device, device, place.recorder,
      describe_share(place, local_parameters(*network)));
  announce(place, model->describe());
  return model;
}

std::unique_ptr<ParallelModel>
make_placed_model(const Job& job, const ModelPlace& place) {
  const Placement placement = placement::plan_placement(
      place.source.layers, placement_options(job, place));
  const auto lines = placement::describe(placement);
  announce(place, lines);
  auto network = std::make_shared<PlacedNetwork>(
      wrapped(job, place.source), placement, job.train.seed);
  if (!job.model.weights.empty()) load_weights(*network, job.model.weights);
  to_dtype(*network, dtype_of(job.model.dtype));
  network->train();
  network->set_recorder(place.recorder);
  const auto& devices = network->placement().devices;
  return std::make_unique<InProcessModel<PlacedNetwork>>(
      job, place, network, devices.front().device, devices.back().device,
      /*recorder=*/nullptr, lines);
}

}  // namespace echelon
