// The whole list of layers on every rank; each layer whole, or cut over the ranks
// of a tensor-parallel group.
#include "echelon/models/weights.h"
#include "echelon/timeline/units.h"
#include "echelon/train/in_process_model.h"

namespace echelon {
namespace {

std::shared_ptr<Network> build(const Job& job, const ModelPlace& place) {
  const LayerList layers = place.source.cut(tensor_parallel(job, place.groups));
  auto network = build_network(layers, 0, layers.size(), job.train.seed);
  if (!job.model.weights.empty()) load_weights(*network, job.model.weights);
  to_dtype(*network, dtype_of(job.model.dtype));
  network->to(place.world.device());
  network->train();
  return network;
}

class WholeListModel : public InProcessModel<Network> {
 public:
  WholeListModel(
      const Job& job,
      const ModelPlace& place,
      const std::shared_ptr<Network>& network,
      torch::Device device)
      : InProcessModel(job, place, network, device, device, place.recorder) {
    if (job.layout.tp == 1) return;
    const int64_t all = place.source.num_parameters();
    int64_t own = 0;
    for (const auto& parameter : network->parameters()) {
      own += parameter.numel();
    }
    lines_ = {
        "tensor-parallel rank " +
        std::to_string(place.groups.along(Axis::tp).rank()) + " of " +
        std::to_string(job.layout.tp) + ": " + std::to_string(own) + " of " +
        std::to_string(all) + " parameters, " +
        format_percent(static_cast<double>(own) / static_cast<double>(all))};
  }

  std::vector<std::string> describe() const override { return lines_; }

 private:
  std::vector<std::string> lines_;
};

}  // namespace

std::unique_ptr<ParallelModel>
make_data_parallel_model(const Job& job, const ModelPlace& place) {
  const torch::Device device = place.world.device();
  auto network = build(job, place);
  auto model = std::make_unique<WholeListModel>(job, place, network, device);
  echelon::announce(place, model->describe());
  return model;
}

}  // namespace echelon
