#include "echelon/models/build.h"
#include "echelon/models/layers.h"

namespace echelon::models {

LayerList mlp_layers(
    int64_t features, const std::vector<int64_t>& hidden, int64_t classes) {
  LayerList layers;
  int64_t in = features;
  for (size_t i = 0; i <= hidden.size(); ++i) {
    const bool first = i == 0;
    const bool last = i == hidden.size();
    const int64_t out = last ? classes : hidden[i];
    layers.add(
        "fc" + std::to_string(i + 1),
        [in, out] { return std::make_shared<Linear>(in, out); },
        [first, last](const Linear& fc, const torch::Tensor& x) {
          auto y = fc.forward(first ? x.reshape({x.size(0), -1}) : x);
          return last ? y : at::relu_(y);
        });
    in = out;
  }
  return layers;
}

}  // namespace echelon::models
