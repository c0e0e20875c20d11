// Data parallelism: every rank has all layers, each of them complete or sharded
// over a tensor-parallel group.
#include "echelon/text/format.h"
#include "echelon/text/units.h"
#include "echelon/train/strategies/in_process_model.h"
#include "echelon/train/strategies/rank_layers.h"

namespace echelon {
namespace {

std::shared_ptr<Network> build(const Job& job, const ModelPlace& place) {
  const LayerList layers =
      place.source.sharded(tensor_parallel(job, place.groups));
  return RankLayers(job, place, layers, {.slices = {{0, layers.size()}}})
      .networks()
      .front();
}

class WholeListModel : public InProcessModel<Network> {
 public:
  WholeListModel(
      const Job& job, const ModelPlace& place,
      const std::shared_ptr<Network>& network, torch::Device device)
      : InProcessModel(job, place, network, device, device, place.recorder) {
    if (job.layout.tp == 1) return;
    const int64_t all = place.source.num_parameters();
    int64_t own = 0;
    for (const auto& parameter : network->parameters()) {
      own += parameter.numel();
    }
    lines_ = {format(
        "tensor-parallel rank {} of {}: {} of {} parameters, {}",
        place.groups.along(Axis::tp).rank(), job.layout.tp, own, all,
        format_percent(static_cast<double>(own) / static_cast<double>(all)))};
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
