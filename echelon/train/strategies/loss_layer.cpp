#include "echelon/train/strategies/loss_layer.h"

#include <memory>

#include "echelon/train/strategies/objective.h"

namespace echelon {

std::vector<int64_t>
with_samples(int64_t samples, const std::vector<int64_t>& shape) {
  std::vector<int64_t> whole = {samples};
  whole.insert(whole.end(), shape.begin(), shape.end());
  return whole;
}

LayerList with_loss(
    const LayerList& layers, const ModelSource& source,
    const TensorParallel& parallel, int64_t samples) {
  LayerList all;
  for (const auto& layer : layers.layers()) all.add_definition(layer);
  for (const auto& tie : layers.ties()) all.tie(tie.first, tie.second);
  const std::shared_ptr<Objective> objective =
      objective_for(source.sample, source.classes, parallel);
  const auto targets = torch::empty(
      with_samples(samples, source.sample.target_shape),
      torch::dtype(source.sample.target_dtype).device(torch::kMeta));
  all.add_definition({"loss", [objective, targets] {
                        return BuiltLayer{nullptr, [=](const Tensors& outputs) {
                                            return Tensors{objective->loss_sum(
                                                outputs, targets)};
                                          }};
                      }});
  return all;
}

}  // namespace echelon
