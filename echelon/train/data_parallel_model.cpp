// The whole model on every rank.
#include "echelon/train/in_process_model.h"

namespace echelon {
namespace {

std::shared_ptr<Network> build(const Job& job, const ModelPlace& place) {
  auto network = build_network(
      place.source.layers, 0, place.source.layers.size(), job.train.seed);
  if (!job.model.weights.empty()) load_weights(*network, job.model.weights);
  to_dtype(*network, dtype_of(job.model.dtype));
  network->to(place.world.device());
  network->train();
  return network;
}

}  // namespace

std::unique_ptr<ParallelModel>
make_data_parallel_model(const Job& job, const ModelPlace& place) {
  const torch::Device device = place.world.device();
  return std::make_unique<InProcessModel<Network>>(
      job, place, build(job, place), device, device, place.recorder);
}

}  // namespace echelon
