// A model of one's own under Echelon's trainer: data, sharded and pipeline
// parallel by one argument, with checkpoints, resume, evaluation and a report.
//
//   echelon run -n 2 -- build/bin/06_own_model examples/configs/own_model.toml
//   echelon run -n 2 -- build/bin/06_own_model … pp=2           # a pipeline
//   echelon run -n 2 -- build/bin/06_own_model … fsdp=2 verify  # equal to 1?
#include <torch/torch.h>

#include <iostream>

#include "echelon/train/trainer.h"
#include "echelon/train/verify.h"

using torch::Tensor;

echelon::LayerList my_model() {
  echelon::LayerList layers;
  layers.add_function("flat", [](const Tensor& x) { return x.flatten(1); });
  layers.add("in", [] { return torch::nn::Linear(64, 128); });
  for (const char* name : {"block.0", "block.1", "block.2"}) {
    layers.add(
        name, [] { return torch::nn::Linear(128, 128); },
        [](auto& fc, const Tensor& x) {
          return x + torch::gelu(fc.forward(x));
        });
  }
  layers.add("out", [] { return torch::nn::Linear(128, 10); });
  return layers;  // its last layer returns a score for each class
}

int main(int argc, char** argv) {
  auto world = echelon::World::from_environment();
  const auto job = echelon::load_job(
      argc > 1 ? argv[1] : "own.toml",
      {.layout = argc > 2 ? argv[2] : "", .num_ranks = world.size()});
  const echelon::OwnParts own{.layers = my_model()};  // .dataset, .objective …
  if (argc > 3) {  // "verify": loss, gradients, parameters against one device
    const auto result = echelon::verify(job, world, {}, own);
    if (world.rank() == 0) std::cout << to_text(result, {});
    return result.passed ? 0 : 1;
  }
  // Makes the run's folder; Ctrl-C saves, then stops.
  echelon::train(job, world, own);
}
