#include "echelon/train/strategies/rank_layers.h"

#include <algorithm>

#include "echelon/architecture/language_model.h"
#include "echelon/parallel/data/coalesced.h"
#include "echelon/train/strategies/count_job.h"

namespace echelon {
namespace {

// None: the gradients' own.
std::optional<torch::Dtype> dtype_of(ReduceDtype reduce) {
  if (reduce == ReduceDtype::same) return std::nullopt;
  return reduce == ReduceDtype::bf16 ? torch::kBFloat16 : torch::kFloat32;
}

ShardedUnitsOptions units_options(
    const Job& job, const ModelPlace& place, const RankLayersOptions& options) {
  ShardedUnitsOptions result;
  result.shard = job.shard;
  result.unshard_once = options.unshard_once;
  if (in_16_bits(job.precision.compute)) result.compute = compute_dtype(job);
  if (adds_gradients(job)) {
    result.reduce = dtype_of(job.precision.reduce);
  }
  result.offload_optimizer = job.memory.offload != Offload::none;
  result.offload_shards = job.memory.offload == Offload::parameters;
  for (const auto& tie : options.ties) {
    result.own_buffer.insert(tie.first);
    result.own_buffer.insert(tie.second);
  }
  if (!place.world.device().is_cpu()) {
    result.padded = vocabulary_matrices(job, place.source);
  }
  return result;
}

}  // namespace

std::optional<LayerMemory> layer_memory(
    const Job& job, const ModelSource& source,
    const std::vector<std::pair<size_t, size_t>>& slices, int64_t in_flight) {
  if (job.memory.recompute == Recompute::none &&
      job.memory.activations == Activations::keep) {
    return std::nullopt;
  }
  std::vector<cost::RecomputeCost> own;
  if (job.memory.recompute == Recompute::budget) {
    // The plan's costs, of the first tensor-parallel rank and the largest
    // microbatch, so that all ranks with a layer choose the same.
    const auto costs = memory_plan::recompute_costs(count_memory(job, source));
    for (const auto& [begin, end] : slices) {
      own.insert(
          own.end(), costs.begin() + static_cast<std::ptrdiff_t>(begin),
          costs.begin() + static_cast<std::ptrdiff_t>(end));
    }
  } else {
    for (const auto& [begin, end] : slices)
      own.resize(own.size() + end - begin);
  }
  return LayerMemory(
      job.memory, cost::plan_recompute(job.memory, own, in_flight));
}

RankLayers::RankLayers(
    const Job& job, const ModelPlace& place, const LayerList& layers,
    RankLayersOptions options)
    : device_(place.world.device()),
      data_(place.groups.data()),
      shard_(place.groups.shard()),
      replicate_(place.groups.replicate()),
      tensor_(tensor_parallel(job, place.groups)),
      layers_(layers),
      memory_(
          layer_memory(job, place.source, options.slices, options.in_flight)) {
  if (shards_parameters(job)) {
    auto units = units_options(job, place, options);
    if (tensor_.experts.size() > 1) {
      units.apart = std::make_shared<ShardedUnitsOptions::Apart>(
          ShardedUnitsOptions::Apart{
              [](const std::string& name) {
                return expert_of(name).has_value();
              },
              place.groups.expert_shard(),
              place.groups.along(Axis::dp_replicate)});
    }
    make_units(std::move(units));
  }
  build(job.model, job.train.seed, options);
  routers_.emplace(
      std::vector<std::shared_ptr<torch::nn::Module>>(
          networks_.begin(), networks_.end()),
      language_shape(job, place.source), data_, device_);
}

void RankLayers::make_units(ShardedUnitsOptions options) {
  if (tensor_.size() > 1) {
    options.before_reduce = [this](const auto& parameters) {
      std::vector<torch::Tensor> tensors;
      for (const auto& [_, tensor] : parameters) tensors.push_back(tensor);
      for (auto& shared : shared_) shared.finish(tensors);
    };
  }
  units_ =
      std::make_unique<ShardedUnits>(shard_, replicate_, std::move(options));
}

void RankLayers::build(
    const ModelOptions& model, uint64_t seed,
    const RankLayersOptions& options) {
  dtype_ = dtype_of(model.dtype);
  if (!model.weights.empty()) {
    weights_ = std::make_unique<LayerWeights>(layers_, model.weights);
  }
  for (size_t slice = 0; slice < options.slices.size(); ++slice) {
    const auto [begin, end] = options.slices[slice];
    slice_units_.emplace_back();
    layer_units_.emplace_back();
    networks_.push_back(build_network(
        layers_, begin, end, seed,
        [&](NewLayer& layer) { prepare(layer, slice, options); }));
    auto& network = *networks_.back();
    network.train();
    shards_.merge(shards_of(network));
    shared_.emplace_back(network, tensor_);
    if (!units_) continue;
    if (model.sync_batch_norm) {
      converted_.push_back(convert_sync_batch_norm(network, data_));
    }
    network.set_unshard([this, slice](size_t layer) -> std::shared_ptr<void> {
      const auto& units = layer_units_[slice][layer];
      if (units.empty()) return nullptr;
      return units_->unshard(units);
    });
  }
  weights_.reset();
}

void RankLayers::prepare(
    NewLayer& layer, size_t slice, const RankLayersOptions& options) {
  auto* module = layer.layer.module.get();
  if (weights_) weights_->load(layer.index, module);
  if (module != nullptr) {
    to_dtype(*module, dtype_);
    module->to(device_);
  }
  // The wrappers nest from the inside out: recompute is outside of sharding, so
  // that a forward that runs again unshards its parameters again.
  if (options.innermost) {
    layer.layer.forward = options.innermost(layer.layer, layer.index);
  }
  if (units_) shard(layer, slice);
  if (memory_) {
    layer.layer.forward = memory_->wrap(
        built_, layer.layer.name, std::move(layer.layer.forward),
        layer.layer.module);
  }
  ++built_;
}

void RankLayers::shard(NewLayer& layer, size_t slice) {
  std::vector<size_t> units;
  if (!layer.parameters.empty()) {
    units.push_back(units_->add(layer.layer.name, layer.parameters));
    slice_units_[slice].push_back(units.back());
  }
  for (const auto& shared : layer.shared) {
    units_->share(shared);
    const auto unit = units_->unit_of(shared);
    if (unit && std::count(units.begin(), units.end(), *unit) == 0) {
      units.push_back(*unit);
    }
  }
  if (!units.empty()) {
    layer.layer.forward = units_->wrap(units, std::move(layer.layer.forward));
  }
  layer_units_[slice].push_back(std::move(units));
}

void RankLayers::train(bool on) {
  for (const auto& network : networks_) network->train(on);
}

void RankLayers::sync_buffers() {
  if (!units_ || data_.size() == 1) return;
  std::vector<torch::Tensor> all;
  for (const auto& part : buffers()) all.push_back(part.value);
  if (!all.empty()) broadcast_tensors(all, 0, data_, "buffers");
}

void RankLayers::finish_shared() {
  if (units_) return;
  for (auto& shared : shared_) shared.finish();
}

std::vector<LocalParameter> RankLayers::parameters() const {
  std::vector<LocalParameter> all;
  if (!units_) {
    for (const auto& network : networks_) {
      const auto own = local_parameters(*network);
      all.insert(all.end(), own.begin(), own.end());
    }
    return all;
  }
  for (auto& part : units_->parts()) {
    all.push_back(
        {.name = part.name,
         .value = part.value,
         .gradient = part.gradient,
         .range = part.range});
    const auto shard = shards_.find(part.name);
    if (shard != shards_.end()) all.back().shard = shard->second;
  }
  return all;
}

std::vector<LocalParameter> RankLayers::buffers() const {
  std::vector<LocalParameter> all;
  for (const auto& network : networks_) {
    const auto own = local_buffers(*network);
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

std::vector<ParameterGroup>
RankLayers::optimizer_groups(double weight_decay) const {
  if (!units_) {
    return trained_groups(parameters(), weight_decay);
  }
  ParameterGroup decayed{.weight_decay = weight_decay};
  ParameterGroup plain;
  for (const auto& flat : units_->flat_shards()) {
    (flat.decays ? decayed : plain)
        .parameters.emplace_back(flat.name, flat.tensor);
  }
  return {std::move(decayed), std::move(plain)};
}

void RankLayers::after_update(bool updated) {
  if (units_) units_->after_update(updated);
}

void RankLayers::before_load() {
  if (units_) units_->before_load();
}

void RankLayers::after_load() {
  if (units_) units_->after_load();
}

}  // namespace echelon
