// Every rank must choose the same boundaries. So all count the same layers,
// those of the first tensor-parallel rank, and what only one rank knows, such
// as measured times, is broadcast by agree(). The work is FLOPs or measured
// seconds, the limits are the memory of each rank divided by its stages, and
// layout/partition.h finds the boundaries.
//
// A layer's time is the shortest of a few runs, which other work on the machine
// disturbs least. A rank's speed must not be that: a limit on its share of a
// core stops it for a while and then lets it run at full speed. It follows from
// the time of many runs, about kTimedSeconds.
#include "echelon/train/strategies/model_partition.h"

#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <sstream>

#include "echelon/parallel/placement/placement.h"
#include "echelon/schedule/memory.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon {
namespace {

constexpr int kTimedRuns = 3;
constexpr double kTimedSeconds = 0.4;  // a core's limits are for 0.1 s each
constexpr double kMostTimedRuns = 1000;
constexpr double kAlikeSpeeds = 0.85;  // measurements differ by as much

// Returns one rank's numbers on every rank.
std::vector<double>
agree(std::vector<double> values, World& world, size_t rank = 0) {
  std::string text;
  for (const double value : values) text += format("{:.17g} ", value);
  std::istringstream agreed(world.exchange(text)[rank]);
  values.clear();
  for (double value = 0; agreed >> value;) values.push_back(value);
  return values;
}

Tensors random_tensors(
    const std::vector<counting::TensorSpec>& specs, torch::Device device) {
  Tensors tensors;
  for (const auto& spec : specs) {
    const auto options = torch::dtype(spec.dtype).device(device);
    tensors.push_back(
        c10::isFloatingType(spec.dtype) ? torch::rand(spec.shape, options)
                                        : torch::zeros(spec.shape, options));
  }
  return tensors;
}

// Runs forward and backward; returns the outputs, detached, for the next layer.
Tensors run_once(const BuiltLayer& layer, const Tensors& given) {
  Tensors inputs;
  for (const auto& tensor : given) {
    inputs.push_back(
        tensor.detach().requires_grad_(tensor.is_floating_point()));
  }
  const Tensors outputs = layer.forward(inputs);
  torch::Tensor sum;
  for (const auto& output : outputs) {
    if (!output.requires_grad()) continue;
    sum = sum.defined() ? sum + output.sum() : output.sum();
  }
  if (sum.defined()) sum.backward();
  Tensors results;
  for (const auto& output : outputs) results.push_back(output.detach());
  return results;
}

// What stages are balanced by.
struct StageWork {
  std::vector<double> seconds;  // by layer, or FLOPs
  std::vector<double> speeds;   // by stage; empty: all are alike
};

struct LayerTimes {
  std::vector<double> seconds;  // by layer: the shortest run
  double elapsed = 0;           // of all runs
};

// Forward and backward of each layer on `device`, of a random microbatch, so
// many times. Builds one layer at a time.
LayerTimes time_layers(
    const LayerList& layers, const std::vector<counting::TensorSpec>& inputs,
    torch::Device device, int64_t runs) {
  using Clock = std::chrono::steady_clock;
  LayerTimes times;
  Tensors values = random_tensors(inputs, device);
  for (const auto& definition : layers.layers()) {
    const BuiltLayer layer = definition.build();
    if (layer.module) {
      if (definition.initialize) definition.initialize(*layer.module, 0);
      layer.module->to(device);
      to_dtype(*layer.module, inputs[0].dtype);
    }
    double best = std::numeric_limits<double>::max();
    Tensors outputs = run_once(layer, values);  // not timed: first touch
    for (int64_t run = 0; run < runs; ++run) {
      const auto begin = Clock::now();
      outputs = run_once(layer, values);
      if (at::accelerator::isAccelerator(device.type())) {
        outputs[0].flatten()[0].item();
      }
      const double seconds =
          std::chrono::duration<double>(Clock::now() - begin).count();
      times.elapsed += seconds;
      best = std::min(best, seconds);
    }
    times.seconds.push_back(best);
    values = std::move(outputs);
  }
  return times;
}

// The number that each rank of the world has, on every rank.
std::vector<double> of_ranks(double own, World& world) {
  std::vector<double> all;
  for (const auto& text : world.exchange(format("{:.17g}", own))) {
    all.push_back(std::stod(text));
  }
  return all;
}

// All tensor-parallel groups time the layers at the same time, as they will
// train. All ranks do the same work, whose amount the fastest one limits.
StageWork measured_work(
    const Job& job, const ModelPlace& place,
    const std::vector<counting::TensorSpec>& inputs, const Schedule& schedule) {
  const LayerList layers =
      place.source.sharded(tensor_parallel(job, place.groups));
  const auto device = place.world.device();
  const LayerTimes times = time_layers(layers, inputs, device, kTimedRuns);
  const auto of_all = of_ranks(times.elapsed, place.world);
  const auto fastest = std::ranges::min_element(of_all);
  const auto runs = static_cast<int64_t>(
      std::clamp(kTimedSeconds * kTimedRuns / *fastest, 1.0, kMostTimedRuns));
  const double elapsed = time_layers(layers, inputs, device, runs).elapsed;
  return {
      agree(
          times.seconds, place.world,
          static_cast<size_t>(fastest - of_all.begin())),
      stage_speeds(
          place.groups.mesh(), schedule, of_ranks(elapsed, place.world))};
}

// The memory of each pipeline rank, where it is known.
std::vector<double>
memory_of_ranks(const Job& job, const Schedule& schedule, World& world) {
  std::vector<double> ranks(
      job.model.device_bytes.begin(), job.model.device_bytes.end());
  const auto here = placement::device_memory(world.device());
  if (ranks.empty() && here) {
    ranks.assign(
        static_cast<size_t>(schedule.num_ranks()), static_cast<double>(*here));
    ranks = agree(std::move(ranks), world);
  }
  return ranks;
}

// The memory that each stage may take: its share of its rank's.
std::vector<int64_t>
limits_of(const Schedule& schedule, const std::vector<double>& ranks) {
  std::vector<int64_t> limits;
  for (size_t stage = 0;
       !ranks.empty() && stage < schedule.rank_of_stage.size(); ++stage) {
    const int32_t rank = schedule.rank_of_stage[stage];
    const auto sharers = static_cast<double>(schedule.stages_of(rank).size());
    limits.push_back(
        static_cast<int64_t>(ranks.at(static_cast<size_t>(rank)) / sharers));
  }
  return limits;
}

// Bytes of a layer's parameters, their gradients and the optimizer's state on a
// rank of dp_shard.
int64_t state_bytes(const Job& job, const counting::LayerCost& cost) {
  const int64_t full = cost.parameter_bytes;
  const auto share = [&](int64_t bytes) {
    return (bytes + job.layout.dp_shard - 1) / job.layout.dp_shard;
  };
  int64_t bytes =
      cost.buffer_bytes + share(optimizer_copies(job.optimizer) * full);
  bytes += job.shard.stage >= 3 ? share(full) : full;
  bytes += job.shard.stage >= 2 ? share(full) : full;
  return bytes;
}

SliceMemory memory_of(
    const Job& job, const std::vector<counting::LayerCost>& costs,
    const Schedule& schedule, const std::vector<double>& memory_of_ranks) {
  SliceMemory memory{.limits = limits_of(schedule, memory_of_ranks)};
  for (const auto& cost : costs) {
    memory.bytes.push_back(state_bytes(job, cost));
    memory.stored_bytes.push_back(cost.activation_bytes + cost.repeated_bytes);
    memory.names.push_back(cost.name);
  }
  for (const int32_t stored : stored_activations(schedule).stages) {
    memory.stored.push_back(stored);
  }
  return memory;
}

std::vector<size_t> boundaries_of(
    const Job& job, const std::vector<std::string>& names,
    const StageWork& work, size_t slices, const SliceMemory& memory) {
  if (!job.model.partition_at.empty()) {
    auto boundaries = partition_at(names, job.model.partition_at, slices);
    check_fits(boundaries, memory);
    return boundaries;
  }
  return job.model.balance == StageBalance::memory
             ? balance_memory(slices, memory)
             : balance(work.seconds, slices, memory, work.speeds);
}

std::vector<std::string> describe_stages(
    const ModelPartition& partition, const StageWork& measured,
    const SliceMemory& memory, const Schedule& schedule, int64_t tp) {
  const auto& work = measured.seconds;
  double total = 0;
  for (const double one : work) total += one;
  const auto bytes = slice_bytes(partition.boundaries, memory);
  std::vector<std::string> lines;
  for (size_t i = 0; i + 1 < partition.boundaries.size(); ++i) {
    const size_t begin = partition.boundaries[i];
    const size_t end = partition.boundaries[i + 1];
    double own = 0;
    int64_t parameters = 0;
    for (size_t layer = begin; layer < end; ++layer) {
      own += work[layer];
      parameters += partition.costs[layer].parameters;
    }
    lines.push_back(format(
        "stage {} (pipeline rank {}): {}{}, {} of the work{}, {}, {}{}", i,
        schedule.rank_of_stage[i], partition.layers[begin],
        (end - begin > 1 ? " to " + partition.layers[end - 1] : ""),
        format_percent(total > 0 ? own / total : 0),
        measured.speeds.empty() ? ""
                                : format(
                                      " at {} of the fastest's speed",
                                      format_percent(measured.speeds[i])),
        counted(parameters, "parameter"), format_bytes(bytes[i]),
        (tp > 1 ? format(" on the first of {} tensor-parallel ranks", tp)
                : "")));
  }
  return lines;
}

}  // namespace

int64_t optimizer_copies(const OptimizerOptions& options) {
  if (options.name != OptimizerKind::sgd) return 2;  // Adam's two moments
  return options.momentum > 0 ? 1 : 0;
}

std::vector<size_t> stage_boundaries(
    const Job& job, const Schedule& schedule,
    const std::vector<counting::LayerCost>& costs) {
  std::vector<std::string> names;
  for (const auto& cost : costs) names.push_back(cost.name);
  const std::vector<double> ranks(
      job.model.device_bytes.begin(), job.model.device_bytes.end());
  return boundaries_of(
      job, names, {.seconds = counting::flops_of(costs)},
      static_cast<size_t>(schedule.num_stages()),
      memory_of(job, costs, schedule, ranks));
}

std::vector<double> stage_speeds(
    const Mesh& mesh, const Schedule& schedule,
    const std::vector<double>& seconds) {
  std::vector<double> slowest(static_cast<size_t>(schedule.num_ranks()), 0);
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    double& most =
        slowest.at(static_cast<size_t>(mesh.coordinate(rank, Axis::pp)));
    most = std::max(most, seconds.at(static_cast<size_t>(rank)));
  }
  const auto [least, most] = std::ranges::minmax(slowest);
  if (least > kAlikeSpeeds * most) return {};
  std::vector<double> speeds;
  for (const int32_t rank : schedule.rank_of_stage) {
    speeds.push_back(least / slowest.at(static_cast<size_t>(rank)));
  }
  return speeds;
}

std::vector<std::string> measured_partition(
    const LayerList& layers, const std::vector<counting::TensorSpec>& inputs,
    size_t slices, World& world) {
  std::vector<double> seconds;
  if (world.rank() == 0) {
    seconds = time_layers(layers, inputs, world.device(), kTimedRuns).seconds;
  }
  const auto partition = balance(agree(std::move(seconds), world), slices);
  std::vector<std::string> first;
  for (size_t i = 1; i < slices; ++i)
    first.push_back(layers[partition[i]].name);
  return first;
}

ModelPartition partition_into_stages(
    const Job& job, const ModelPlace& place, const Schedule& schedule) {
  // Every rank counts the layers of the first tensor-parallel rank: none has
  // more, and so all choose the same boundaries.
  const LayerList layers = place.source.sharded(silent_tensor_parallel(job));
  const int64_t pieces = job.layout.data_ranks() * schedule.num_microbatches;
  const auto inputs = input_specs(
      job, place.source, std::max<int64_t>(1, job.train.batch / pieces));

  ModelPartition partition;
  partition.layers = layers.names();
  partition.costs = counting::count_layers(layers, inputs);
  const auto slices = static_cast<size_t>(schedule.num_stages());
  partition.memory = memory_of(
      job, partition.costs, schedule,
      memory_of_ranks(job, schedule, place.world));
  const StageWork work =
      job.model.balance == StageBalance::measured
          ? measured_work(job, place, inputs, schedule)
          : StageWork{.seconds = counting::flops_of(partition.costs)};
  partition.boundaries =
      boundaries_of(job, partition.layers, work, slices, partition.memory);
  partition.lines = describe_stages(
      partition, work, partition.memory, schedule, job.layout.tp);
  partition.work = work.seconds;
  return partition;
}

}  // namespace echelon
