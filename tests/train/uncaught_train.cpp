// A program whose layer throws what nobody catches, in the sixth step of its
// training. usage: uncaught_train FOLDER. Started by train_command_test.
#include <torch/torch.h>

#include <stdexcept>

#include "echelon/comm/world.h"
#include "echelon/layers/layer_list.h"
#include "echelon/train/trainer.h"

int main(int, char** arguments) {
  int calls = 0;
  echelon::LayerList layers;
  layers.add_function("fails", [&calls](const torch::Tensor& values) {
    if (!values.is_meta() && ++calls == 6) throw std::runtime_error("planted");
    return values;
  });
  layers.add(
      "head", [] { return torch::nn::Linear(16, 2); },
      [](auto& head, const torch::Tensor& values) {
        return head.forward(values.flatten(1));
      });
  echelon::Job job;
  job.data.name = echelon::DataKind::dummy;
  job.data.samples = 64;
  job.data.holdout = 0;
  job.data.shape = {1, 4, 4};
  job.data.classes = 2;
  job.train.batch = 4;
  job.train.steps = 10;
  auto world = echelon::World::from_environment();
  echelon::train(job, world, arguments[1], &layers);
}
