// Layers partitioned over the devices of one process, with data parallelism
// over processes.
#include <algorithm>

#include "echelon/models/weights.h"
#include "echelon/parallel/placement/placed_network.h"
#include "echelon/train/strategies/in_process_model.h"
#include "echelon/train/strategies/model_partition.h"
#include "echelon/train/strategies/rank_layers.h"

namespace echelon {
namespace {

using placement::PlacedNetwork;
using placement::Placement;
using placement::PlacementOptions;

int64_t optimizer_bytes(const OptimizerOptions& options, torch::Dtype dtype) {
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  if (options.name != "sgd") return 2 * element;  // Adam's two moments
  return options.momentum > 0 ? element : 0;
}

PlacementOptions placement_options(const Job& job, const ModelPlace& place) {
  const torch::Dtype dtype = dtype_of(job.model.dtype);
  const int64_t pieces = job.layout.data_degree() * job.train.accumulate;
  PlacementOptions options;
  for (const auto& name : job.model.devices) options.devices.emplace_back(name);
  options.inputs = input_specs(
      job, place.source, std::max<int64_t>(1, job.train.batch / pieces));
  options.balance = job.model.balance == "memory" ? placement::Balance::memory
                                                  : placement::Balance::time;
  options.cut = job.model.cut;
  options.limits = job.model.device_bytes;
  options.optimizer_bytes = optimizer_bytes(job.optimizer, dtype);
  if (options.cut.empty() && job.model.balance == "measured") {
    options.cut = measured_partition(
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

class PlacedModel : public InProcessModel<PlacedNetwork> {
 public:
  PlacedModel(
      const Job& job, const ModelPlace& place,
      std::shared_ptr<PlacedNetwork> network)
      : InProcessModel(
            job, place, network, network->placement().devices.front().device,
            network->placement().devices.back().device,
            /*recorder=*/nullptr),
        lines_(placement::describe(network->placement())) {}

  std::vector<std::string> describe() const override { return lines_; }

 private:
  std::vector<std::string> lines_;
};

}  // namespace

std::unique_ptr<ParallelModel>
make_placed_model(const Job& job, const ModelPlace& place) {
  const Placement placement = placement::plan_placement(
      place.source.layers, placement_options(job, place));
  announce(place, placement::describe(placement));
  auto network = std::make_shared<PlacedNetwork>(
      wrapped(job, place.source), placement, job.train.seed);
  if (!job.model.weights.empty()) load_weights(*network, job.model.weights);
  to_dtype(*network, dtype_of(job.model.dtype));
  network->train();
  network->set_recorder(place.recorder);
  return std::make_unique<PlacedModel>(job, place, network);
}

}  // namespace echelon
