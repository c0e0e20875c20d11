// The model, the data and the loss of @NAME@. Replace them by yours.
#include "echelon/train/plugin.h"

#include <torch/torch.h>

#include <cmath>

using torch::Tensor;

namespace {

// Points of a plane, and the height of a surface there: sample `index` is
// always the same.
class Surface : public echelon::Dataset {
 public:
  int64_t size() const override { return 4096; }
  echelon::SampleSpec spec() const override {
    return {
        .input_shape = {2},
        .target_shape = {1},
        .target_dtype = torch::kFloat32};
  }
  echelon::Sample
  sample(int64_t index, const echelon::SampleContext&) const override {
    // Multiples of irrational numbers, without their whole part, fill a square.
    const double x = std::fmod(0.7548776662 * static_cast<double>(index), 1.0);
    const double y = std::fmod(0.5698402910 * static_cast<double>(index), 1.0);
    return {
        .input = torch::tensor({x, y}),
        .target = torch::tensor({std::sin(5 * x) * std::cos(5 * y)})};
  }
};

// A layer takes what the one before it returned. The first takes the inputs of
// a batch, [samples, 2].
echelon::LayerList model() {
  echelon::LayerList layers;
  layers.add("in", [] { return torch::nn::Linear(2, 64); });
  for (const char* name : {"block.0", "block.1"}) {
    layers.add(
        name, [] { return torch::nn::Linear(64, 64); },
        [](auto& fc, const Tensor& x) {
          return x + torch::gelu(fc.forward(torch::tanh(x)));
        });
  }
  layers.add("out", [] { return torch::nn::Linear(64, 1); });
  return layers;
}

// The loss is the sum over the samples that it is given. Echelon divides it by
// the samples of the batch on all ranks.
class SquaredError : public echelon::Objective {
 public:
  Tensor loss_sum(
      const echelon::Tensors& outputs, const echelon::Tensors& targets,
      const echelon::BatchRanks&) const override {
    return (outputs[0] - targets[0]).square().sum();
  }
};

echelon::OwnParts parts(const echelon::Job&) {
  return {
      .layers = model(),
      .dataset = std::make_shared<Surface>(),
      .objective = std::make_shared<SquaredError>(),
      .metrics = {
          {.name = "absolute_error",
           .sums = [](const echelon::Tensors& outputs,
                      const echelon::Tensors& targets) {
             return (outputs[0] - targets[0]).abs().sum();
           }}}};
}

}  // namespace

ECHELON_PLUGIN(parts);
