// One list of layers, built on the meta device as a tensor-parallel rank has it
// and with the loss at its end, is counted for two purposes: for a memory plan,
// with each kind of recomputation, and for the cost formulas. A CollectiveTrace
// records the collectives that the layers would make.
#include "echelon/train/strategies/count_job.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "echelon/architecture/language_model.h"
#include "echelon/cluster/cuda_driver.h"
#include "echelon/comm/group.h"
#include "echelon/comm/nccl/accelerator.h"
#include "echelon/comm/trace/record.h"
#include "echelon/counting/layer_cost.h"
#include "echelon/error.h"
#include "echelon/job/compute_dtype.h"
#include "echelon/job/pipeline_schedule.h"
#include "echelon/layers/ties.h"
#include "echelon/memory/layer_memory.h"
#include "echelon/train/strategies/model_partition.h"
#include "echelon/train/strategies/objective.h"

namespace echelon {
namespace {

// Samples of the data-parallel rank that has most, in a step and in a pass.
int64_t largest_local_batch(const Job& job) {
  if (!job.train.rank_batch.empty()) {
    return std::ranges::max(job.train.rank_batch);
  }
  const int64_t ranks = job.layout.data_ranks();
  return (job.train.batch + ranks - 1) / ranks;
}

int64_t largest_microbatch(const Job& job) {
  const int64_t passes = passes_per_step(job);
  return std::max<int64_t>(1, (largest_local_batch(job) + passes - 1) / passes);
}

// The list with the loss as its last layer. The targets are on the meta device,
// so it can be counted, not run. Where a program's loss has an operator without
// a kernel for shapes alone, a sum of the outputs stands for it, and `missing`
// says so.
LayerList with_loss(
    LayerList layers, const ModelSource& source, const TensorParallel& parallel,
    int64_t samples, std::string& missing) {
  const auto objective = std::make_shared<TrainingObjective>(
      source.objective(parallel), is_text(source.sample), parallel,
      Group::alone("data"));
  const auto on_meta = [&](const std::vector<int64_t>& shape,
                           torch::Dtype dtype) {
    return torch::empty(
        with_samples(samples, shape), torch::dtype(dtype).device(torch::kMeta));
  };
  Tensors targets = {on_meta(
      is_text(source.sample) ? tokens_here(source.sample, parallel.context)
                             : source.sample.target_shape,
      source.sample.target_dtype)};
  const bool text = is_text(source.sample);
  for (const auto& more : source.sample.more_targets) {
    const bool of_tokens = text && !more.shape.empty() &&
                           more.shape[0] == source.sample.input_shape[0];
    auto shape = more.shape;
    if (of_tokens && parallel.context.is_used()) {
      shape[0] = parallel.context.length_of(shape[0]);
    }
    targets.push_back(on_meta(shape, more.dtype));
  }
  const auto forward = [objective, targets, &missing](const Tensors& outputs) {
    try {
      return Tensors{objective->loss_sum(outputs, targets)};
    } catch (const c10::NotImplementedError& error) {
      missing = "the loss is not counted, but for its inputs: " +
                detail::first_line(error);
      return Tensors{outputs[0].sum()};
    }
  };
  layers.add_definition({"loss", [forward] {
                           return BuiltLayer{nullptr, forward};
                         }});
  return layers;
}

// ---- for a memory plan

using Calls = std::vector<memory_plan::PlannedCalls>;

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
LayerList recomputed(const LayerList& layers, cost::Recompute choice) {
  std::vector<cost::Recompute> choices(layers.size(), choice);
  choices.back() = cost::Recompute::none;
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

// The device that the job's ranks would have on this machine (World::device).
torch::DeviceType device_of(const Job& job) {
  const auto backend = job.comm.backend;
  switch (job.comm.device) {
    case DeviceKind::cpu:
      return torch::kCPU;
    case DeviceKind::cuda:
      return torch::kCUDA;
    case DeviceKind::test:
      return torch::kPrivateUse1;
    case DeviceKind::automatic:
      break;
  }
  const bool gpu =
      backend == BackendKind::nccl ||
      (backend == BackendKind::automatic &&
       job.train.ranks != RankKind::threads && cuda_device_count() > 0);
  return gpu ? torch::kCUDA : torch::kCPU;
}

struct Counted {
  std::vector<counting::LayerCost> costs;
  std::map<std::string, Calls> forward;
  std::map<std::string, Calls> backward;
};

// As RankLayers pads them.
std::set<std::string>
padded_matrices(const Job& job, const ModelSource& source) {
  if (device_of(job) == torch::kCPU) return {};
  return vocabulary_matrices(job, source);
}

Counted count(
    const Job& job, const ModelSource& source, const LayerList& layers,
    const std::vector<counting::TensorSpec>& inputs) {
  Counted counted;
  CollectiveTrace calls;
  const counting::CountOptions options{
      .dtype = compute_dtype(job),
      .device = device_of(job),
      .flat = shards_parameters(job),
      .padded = padded_matrices(job, source),
      .ran = [&](const std::string& layer, bool backward) {
        (backward ? counted.backward : counted.forward)[layer] =
            summed(calls.take());
      }};
  counted.costs = counting::count_layers(layers, inputs, options);
  return counted;
}

memory_plan::LayerUse use_of(const counting::LayerCost& cost) {
  return {
      .kept_bytes = cost.activation_bytes,
      .repeated_bytes = cost.repeated_bytes,
      .forward_peak_bytes = cost.forward_peak_bytes,
      .backward_peak_bytes = cost.backward_peak_bytes,
      .backward_peak_gradient_bytes = cost.backward_peak_gradient_bytes,
      .backward_working_bytes = cost.backward_working_bytes};
}

memory_plan::PlannedLayer planned(const counting::LayerCost& cost) {
  memory_plan::PlannedLayer layer{
      .name = cost.name,
      .buffer_bytes = cost.buffer_bytes,
      .input_bytes = cost.input_bytes,
      .output_bytes = cost.output_bytes};
  for (const auto& one : cost.parameter_specs) {
    layer.parameters.push_back(
        {.numel = c10::multiply_integers(one.tensor.shape),
         .decays = one.tensor.shape.size() >= 2,
         .trains = one.requires_grad,
         .expert = expert_of(cost.name + "." + one.name).has_value()});
  }
  return layer;
}

// A stage holds a tied parameter once, with the first of its layers there.
void join_ties(
    memory_plan::MemoryModel& model, const LayerList& layers,
    const std::vector<counting::LayerCost>& costs) {
  const auto stage_of = [&](size_t layer) {
    size_t stage = 0;
    while (model.boundaries[stage + 1] <= layer) ++stage;
    return stage;
  };
  for (const auto& group : tied_groups(layers)) {
    std::map<size_t, size_t> first;  // layer, by stage
    memory_plan::PlannedTie tie;
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
    const Job& job, const Schedule& schedule,
    std::vector<counting::LayerCost> costs, std::vector<std::string>& notes) {
  costs.pop_back();  // the loss is no layer of the list
  if (job.layout.pp == 1) return {0, costs.size()};
  if (job.model.balance == StageBalance::measured &&
      job.model.partition_at.empty()) {
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
      counting::TensorSpec{
          with_samples(samples, source.sample.target_shape),
          source.sample.target_dtype}
          .bytes();
  for (const auto& more : source.sample.more_targets) {
    bytes += counting::TensorSpec{with_samples(samples, more.shape), more.dtype}
                 .bytes();
  }
  for (const auto& spec : input_specs(job, source, samples)) {
    bytes += spec.bytes();
  }
  return bytes;
}

// ---- for the cost formulas

cost::CountedOperator
operator_of(const counting::OperatorWork& work, bool on_gpu) {
  std::optional<cluster::ProductKind> product;
  if (!work.product.empty())
    product = cluster::product_kind_from_name(work.product);
  return {
      .name = work.name,
      .product = product,
      .count = work.count,
      .m = work.m,
      .n = work.n,
      .k = work.k,
      .one_weight = work.one_weight,
      .bytes = work.bytes,
      .causal = work.causal,
      .launches = on_gpu ? work.launches : 1,
      .for_weight = work.for_weight};
}

// What the ranks along tp send within a layer. Its bytes are those of the whole
// tensor; an all-gather is given this rank's part.
cost::CountedOperator
operator_of(const TracedCollective& call, const Layout& layout) {
  cost::CountedOperator one{
      .name = call.operation,
      .bytes = static_cast<double>(call.bytes),
      .collective = cost::collective_kind(call.operation)};
  if (!one.collective) {
    throw ConfigError(call.operation + " within a layer has no cost formula");
  }
  if (one.collective == cost::CollectiveKind::all_gather) {
    one.bytes *= static_cast<double>(layout.tp);
  }
  return one;
}

// What runs while these collectives do: a matmul between the call of one and
// the wait for it, which no collective before has.
void find_matmuls_beside(
    std::vector<cost::CountedOperator>& collectives,
    const std::vector<TracedCollective>& calls,
    const std::vector<counting::OperatorWork>& operators) {
  std::set<int64_t> taken;
  for (size_t i = 0; i < calls.size(); ++i) {
    for (int64_t at = calls[i].begin; at < *calls[i].end; ++at) {
      const auto& work = operators.at(static_cast<size_t>(at));
      if (work.product != "product" || !taken.insert(at).second) continue;
      collectives[i].count = work.count;
      collectives[i].one_weight = work.one_weight;
      collectives[i].m = work.m;
      collectives[i].n = work.n;
      collectives[i].k = work.k;
      break;
    }
  }
}

void add_collectives(
    std::vector<cost::CountedOperator>& pass,
    const std::vector<TracedCollective>& calls,
    const std::vector<counting::OperatorWork>& operators,
    const Layout& layout) {
  std::vector<cost::CountedOperator> collectives;
  for (const auto& call : calls) {
    collectives.push_back(operator_of(call, layout));
  }
  find_matmuls_beside(collectives, calls, operators);
  pass.insert(pass.end(), collectives.begin(), collectives.end());
}

double flops_of(const counting::OperatorWork& work) {
  return static_cast<double>(work.count) * static_cast<double>(work.m) *
         static_cast<double>(work.n) * static_cast<double>(work.k);
}

// The largest matmul, and what the other operators move, for one sample.
void summarise(
    cost::CountedLayer& layer,
    const std::vector<counting::OperatorWork>& forward, double element_bytes) {
  const auto samples = static_cast<double>(layer.counted_samples);
  const counting::OperatorWork* largest = nullptr;
  for (const auto& work : forward) {
    if (work.product.empty()) {
      layer.moved_elements += work.bytes / element_bytes / samples;
    } else if (largest == nullptr || flops_of(work) > flops_of(*largest)) {
      largest = &work;
    }
  }
  if (largest == nullptr) return;
  layer.inner = largest->k;
  layer.columns = largest->n;
  layer.rows = static_cast<double>(largest->m) *
               static_cast<double>(largest->count) / samples;
}

cost::CountedLayer layer_of(
    const counting::LayerCost& cost, const counting::LayerOperators& operators,
    int64_t samples, double element_bytes, bool on_gpu) {
  const auto per_sample = 1 / static_cast<double>(samples);
  const auto elements = [&](int64_t bytes) {
    return static_cast<double>(bytes) / element_bytes * per_sample;
  };
  cost::CountedLayer layer{
      .name = cost.name,
      .forward_flops = cost.forward_flops * per_sample,
      .backward_flops = cost.backward_flops * per_sample,
      .parameters = static_cast<double>(cost.parameters),
      .kept_elements = elements(cost.activation_bytes),
      .output_elements = elements(cost.output_bytes),
      .counted_samples = samples};
  summarise(layer, operators.forward, element_bytes);
  for (const auto& work : operators.forward) {
    layer.forward.push_back(operator_of(work, on_gpu));
  }
  for (const auto& work : operators.backward) {
    layer.backward.push_back(operator_of(work, on_gpu));
  }
  for (const auto& one : cost.parameter_specs) {
    if (!one.requires_grad) continue;
    // Two are read and one is written.
    const auto numel =
        static_cast<double>(c10::multiply_integers(one.tensor.shape));
    layer.backward.push_back(
        {.name = "add",
         .bytes = 3 * numel * element_bytes,
         .for_weight = true,
         .accumulates = true});
  }
  return layer;
}

cost::ModelShape shape_of(
    const counting::CountedOperators& all, int64_t samples, torch::Dtype dtype,
    const std::string& name, bool on_gpu = false) {
  cost::ModelShape model{.name = name};
  const auto element_bytes = static_cast<double>(c10::elementSize(dtype));
  for (size_t i = 0; i < all.costs.size(); ++i) {
    model.layers.push_back(
        layer_of(all.costs[i], all.layers[i], samples, element_bytes, on_gpu));
  }
  return model;
}

// The trainer's partition; the loss is on the last stage.
void set_stages(
    cost::ModelShape& model, const Job& job,
    std::vector<counting::LayerCost> costs) {
  costs.pop_back();
  const auto boundaries = stage_boundaries(job, pipeline_schedule(job), costs);
  for (size_t stage = 0; stage + 1 < boundaries.size(); ++stage) {
    for (size_t layer = boundaries[stage]; layer < boundaries[stage + 1];
         ++layer) {
      model.layers[layer].stage = static_cast<int64_t>(stage);
    }
  }
  model.layers.back().stage = model.layers[costs.size() - 1].stage;
}

// A stage counts a tied parameter once, for the first of its layers there.
void join_shape_ties(
    cost::ModelShape& model, const LayerList& layers,
    const std::vector<counting::LayerCost>& costs) {
  for (const auto& group : tied_groups(layers)) {
    std::set<int64_t> stages;
    for (size_t i = 0; i < group.layers.size(); ++i) {
      cost::CountedLayer& layer = model.layers[group.layers[i]];
      if (stages.insert(layer.stage).second) continue;
      for (const auto& one : costs[group.layers[i]].parameter_specs) {
        if (layer.name + "." + one.name != group.names[i]) continue;
        layer.parameters -=
            static_cast<double>(c10::multiply_integers(one.tensor.shape));
      }
    }
  }
}

}  // namespace

Job with_compute_dtype_here(Job job) {
  const auto device = device_of(job);
  if (device == torch::kCPU) check_compute_on_processor(job);
  return with_compute_dtype(
      std::move(job),
      device == torch::kCUDA && cluster::has_bf16(cluster::ask_cuda()));
}

memory_plan::MemoryModel
count_memory(const Job& job, const ModelSource& source) {
  const int64_t samples = largest_microbatch(job);
  const TensorParallel parallel = silent_tensor_parallel(job);
  const LayerList list = source.sharded(parallel);
  std::string missing;
  const LayerList layers = with_loss(list, source, parallel, samples, missing);
  const auto inputs = input_specs(job, source, samples);
  const auto compute = compute_dtype(job);

  const auto device = device_of(job);
  const Counted plain = count(job, source, layers, inputs);
  memory_plan::MemoryModel model;
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
  const auto again = [&](cost::Recompute choice) {
    return count(job, source, recomputed(layers, choice), inputs);
  };
  fill(1, again(cost::Recompute::selective));
  fill(2, again(cost::Recompute::all));
  join_ties(model, list, plain.costs);
  if (!missing.empty()) model.notes.push_back(missing);
  return model;
}

memory_plan::MemoryModel count_memory(const Job& job, const OwnParts& own) {
  const TrainingData data = data_of(job, own);
  return count_memory(job, model_source(job, own, data.train->spec()));
}

bool unshards_once(const Job& job, const ModelSource& source) {
  const bool asks = job.shard.gather == Gather::automatic &&
                    job.layout.pp > 1 && job.memory.limit_bytes > 0;
  return memory_plan::unshards_once(
      asks ? count_memory(job, source) : memory_plan::MemoryModel{}, job);
}

cost::ModelShape counted_shape(const Job& job, const ModelSource& source) {
  const TensorParallel parallel = silent_tensor_parallel(job);
  const int64_t samples = largest_microbatch(job);
  std::string missing;
  const auto layers =
      with_loss(source.sharded(parallel), source, parallel, samples, missing);
  const auto dtype = compute_dtype(job);
  const auto device = device_of(job);
  CollectiveTrace trace;
  std::map<std::string, std::vector<TracedCollective>> forward, backward;
  const auto counted = counting::count_operators(
      layers, input_specs(job, source, samples),
      {.dtype = dtype,
       .device = device,
       .flat = shards_parameters(job),
       .padded = padded_matrices(job, source),
       .ran =
           [&](const std::string& layer, bool is_backward) {
             (is_backward ? backward : forward)[layer] = trace.take();
           },
       .counted =
           [&](size_t operators) {
             trace.move_to(static_cast<int64_t>(operators));
           }});
  cost::ModelShape model =
      shape_of(counted, samples, dtype, source.name, device != torch::kCPU);
  model.layer_ranks = job.layout.tp;
  for (size_t i = 0; i < model.layers.size(); ++i) {
    cost::CountedLayer& layer = model.layers[i];
    const auto& operators = counted.layers[i];
    add_collectives(
        layer.forward, forward.at(layer.name), operators.forward, job.layout);
    add_collectives(
        layer.backward, backward.at(layer.name), operators.backward,
        job.layout);
  }
  if (!missing.empty()) {
    std::fprintf(stderr, "warning: %s\n", missing.c_str());
  }
  if (is_text(source.sample)) model.seq_len = source.sample.input_shape[0];
  if (job.layout.pp > 1) set_stages(model, job, counted.costs);
  join_shape_ties(model, layers, counted.costs);
  return model;
}

cost::ModelShape counted_shape(const Job& job, const OwnParts& own) {
  const TrainingData data = data_of(job, own);
  return counted_shape(job, model_source(job, own, data.train->spec()));
}

cost::ModelShape counted_shape(
    const LayerList& layers, const std::vector<counting::TensorSpec>& inputs,
    int64_t samples, const std::string& name) {
  return shape_of(
      counting::count_operators(layers, inputs), samples, inputs.front().dtype,
      name);
}

}  // namespace echelon
