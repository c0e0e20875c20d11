#include "echelon/train/strategies/count_memory.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "echelon/comm/nccl/cuda.h"
#include "echelon/comm/trace/record.h"
#include "echelon/error.h"
#include "echelon/job/pipeline_schedule.h"
#include "echelon/layers/ties.h"
#include "echelon/layout/partition.h"
#include "echelon/memory/layer_memory.h"
#include "echelon/train/strategies/model_partition.h"

namespace echelon {
namespace {

using Calls = std::vector<PlannedCalls>;

// The schedule of one stage that runs its microbatches one after the other.
Schedule one_stage(int64_t passes) {
  Schedule schedule{
      .name = "one stage",
      .num_microbatches = static_cast<int32_t>(passes),
      .rank_of_stage = {0},
      .ranks = {{}}};
  for (int32_t i = 0; i < schedule.num_microbatches; ++i) {
    schedule.ranks[0].push_back({ActionKind::forward, 0, i});
    schedule.ranks[0].push_back({ActionKind::backward, 0, i});
  }
  return schedule;
}

// The list with this kind of recomputation for each layer but the loss.
LayerList recomputed(const LayerList& layers, Recompute choice) {
  std::vector<Recompute> choices(layers.size(), choice);
  choices.back() = Recompute::none;
  return with_recompute(layers, choices);
}

Calls summed(const std::vector<TracedCollective>& calls) {
  Calls sums;
  for (const auto& one : calls) {
    auto found = std::find_if(sums.begin(), sums.end(), [&](const auto& sum) {
      return sum.operation == one.operation && sum.axis == one.axis;
    });
    if (found == sums.end()) {
      found =
          sums.insert(found, {one.operation, one.axis, "within layers", 0, 0});
    }
    ++found->count;
    found->bytes += one.bytes;
  }
  return sums;
}

struct Counted {
  std::vector<LayerCost> costs;
  std::map<std::string, Calls> forward;
  std::map<std::string, Calls> backward;
};

Counted count(
    const LayerList& layers, const std::vector<TensorSpec>& inputs,
    torch::Dtype compute, torch::DeviceType device) {
  Counted counted;
  CollectiveTrace calls;
  const CountOptions options{
      .dtype = compute,
      .device = device,
      .ran = [&](const std::string& layer, bool backward) {
        (backward ? counted.backward : counted.forward)[layer] =
            summed(calls.take());
      }};
  counted.costs = count_layers(layers, inputs, options);
  return counted;
}

LayerUse use_of(const LayerCost& cost) {
  return {
      .kept_bytes = cost.activation_bytes,
      .repeated_bytes = cost.repeated_bytes,
      .forward_peak_bytes = cost.forward_peak_bytes,
      .backward_peak_bytes = cost.backward_peak_bytes,
      .backward_peak_gradient_bytes = cost.backward_peak_gradient_bytes,
      .backward_working_bytes = cost.backward_working_bytes};
}

PlannedLayer planned(const LayerCost& cost) {
  PlannedLayer layer{
      .name = cost.name,
      .buffer_bytes = cost.buffer_bytes,
      .input_bytes = cost.input_bytes,
      .output_bytes = cost.output_bytes};
  for (const auto& one : cost.parameter_specs) {
    layer.parameters.push_back(
        {.numel = c10::multiply_integers(one.tensor.shape),
         .decays = one.tensor.shape.size() >= 2,
         .trains = one.requires_grad});
  }
  return layer;
}

// A stage holds a tied parameter once, with the first of its layers there.
void join_ties(
    MemoryModel& model, const LayerList& layers,
    const std::vector<LayerCost>& costs) {
  const auto stage_of = [&](size_t layer) {
    size_t stage = 0;
    while (model.boundaries[stage + 1] <= layer) ++stage;
    return stage;
  };
  for (const auto& group : tied_groups(layers)) {
    std::map<size_t, size_t> first;  // layer, by stage
    PlannedTie tie;
    for (size_t i = 0; i < group.layers.size(); ++i) {
      const size_t layer = group.layers[i];
      const auto [owner, is_new] = first.emplace(stage_of(layer), layer);
      const auto& name = layers[layer].name;
      const auto& specs = costs[layer].parameter_specs;
      for (const auto& spec : specs) {
        if (name + "." + spec.name != group.names[i]) continue;
        tie.numel = c10::multiply_integers(spec.tensor.shape);
        tie.trains = spec.requires_grad;
      }
      if (is_new) continue;
      auto& parameters = model.layers[layer].parameters;
      for (size_t k = 0; k < specs.size(); ++k) {
        if (name + "." + specs[k].name != group.names[i]) continue;
        parameters[k].numel = 0;
        model.layers[layer].tied_to.push_back(owner->second);
      }
    }
    if (first.size() == 1) continue;
    for (const auto& [stage, layer] : first) tie.layers.push_back(layer);
    model.ties.push_back(tie);
  }
  for (auto& layer : model.layers) {
    std::erase_if(
        layer.parameters, [](const auto& one) { return one.numel == 0; });
  }
}

std::vector<size_t> boundaries_of(
    const Job& job, const Schedule& schedule, std::vector<LayerCost> costs,
    std::vector<std::string>& notes) {
  costs.pop_back();  // the loss is no layer of the list
  if (job.layout.pp == 1) return {0, costs.size()};
  if (job.model.balance == "measured" && job.model.cut.empty()) {
    notes.push_back(
        "[model] balance = \"measured\" is not measured here: stages are "
        "balanced "
        "by counted operations");
  }
  return stage_boundaries(job, schedule, costs);
}

int64_t batch_bytes(const Job& job, const ModelSource& source) {
  const int64_t samples = largest_local_batch(job);
  int64_t bytes =
      TensorSpec{
          with_samples(samples, source.sample.target_shape),
          source.sample.target_dtype}
          .bytes();
  for (const auto& spec : input_specs(job, source, samples)) {
    bytes += spec.bytes();
  }
  return bytes;
}

// The device that the job's ranks would have on this machine (World::device).
torch::DeviceType device_of(const Job& job) {
  const auto backend = job.comm.backend;
  const bool gpu = backend == BackendKind::nccl ||
                   (backend == BackendKind::automatic &&
                    job.train.ranks != "threads" && cuda_device_count() > 0);
  return gpu ? torch::kCUDA : torch::kCPU;
}

}  // namespace

MemoryModel count_memory(const Job& job, const ModelSource& source) {
  const int64_t samples = largest_microbatch(job);
  const TensorParallel parallel = silent_tensor_parallel(job);
  const LayerList list = source.sharded(parallel);
  const LayerList layers = with_loss(list, source, parallel, samples);
  const auto inputs = input_specs(job, source, samples);
  const auto compute = compute_dtype(job);

  const auto device = device_of(job);
  const Counted plain = count(layers, inputs, compute, device);
  MemoryModel model;
  model.schedule = job.layout.pp > 1 ? pipeline_schedule(job)
                                     : one_stage(passes_per_step(job));
  model.boundaries =
      boundaries_of(job, model.schedule, plain.costs, model.notes);
  model.boundaries.back() = layers.size();
  model.master_bytes =
      static_cast<int64_t>(c10::elementSize(dtype_of(job.model.dtype)));
  model.compute_bytes = static_cast<int64_t>(c10::elementSize(compute));
  model.num_parameters = source.num_parameters();
  model.batch_bytes = batch_bytes(job, source);
  model.host_is_device = device == torch::kCPU;

  for (const auto& cost : plain.costs) {
    model.layers.push_back(planned(cost));
  }
  const auto fill = [&](size_t choice, const Counted& counted) {
    for (size_t i = 0; i < model.layers.size(); ++i) {
      auto& layer = model.layers[i];
      layer.use[choice] = use_of(counted.costs[i]);
      if (i == 0) {  // its input is the batch, which is counted apart
        layer.use[choice].kept_bytes -= counted.costs[i].kept_input_bytes;
      }
      layer.backward_calls[choice] = counted.backward.at(layer.name);
      layer.again_flops[choice] = std::max(
          0.0, counted.costs[i].backward_flops - plain.costs[i].backward_flops);
      if (choice == 0) layer.forward_calls = counted.forward.at(layer.name);
    }
  };
  fill(0, plain);
  const auto again = [&](Recompute choice) {
    return count(recomputed(layers, choice), inputs, compute, device);
  };
  fill(1, again(Recompute::selective));
  fill(2, again(Recompute::all));
  join_ties(model, list, plain.costs);
  return model;
}

MemoryModel count_memory(const Job& job) {
  const TrainingData data = open_data(job.data, job.train.seed);
  return count_memory(job, model_source(job, data.train->spec()));
}

bool gathers_once(const Job& job, const ModelSource& source) {
  const bool asks = job.shard.gather == "auto" && job.layout.pp > 1 &&
                    job.memory.limit_bytes > 0;
  return gathers_once(asks ? count_memory(job, source) : MemoryModel{}, job);
}

}  // namespace echelon
