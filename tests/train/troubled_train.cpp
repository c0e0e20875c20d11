// A program with a layer that makes trouble. usage:
//
//   troubled_train FOLDER throws   in the sixth step, what nobody catches
//   troubled_train FOLDER hangs    on rank 1 after a second, until the ranks
//                                  are started again
//   troubled_train FOLDER flips    a bit of rank 1's weight in the eighth step,
//                                  until the ranks are started again
//   troubled_train FOLDER none     the same job without it
#include <torch/torch.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#include "echelon/comm/world.h"
#include "echelon/environment/rank_environment.h"
#include "echelon/layers/layer_list.h"
#include "echelon/train/trainer.h"

namespace {

using std::chrono::steady_clock;

void throw_in_the_sixth_step() {
  static int calls = 0;
  if (++calls == 6) throw std::runtime_error("planted");
}

void hang_after_a_second() {
  static const auto started = steady_clock::now();
  static const auto environment = echelon::read_environment();
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (environment.rank != 1 || environment.generation > 0) return;
  while (steady_clock::now() - started > std::chrono::milliseconds(1500)) {
  }
}

void flip_in_the_eighth_step(torch::Tensor weight) {
  static int calls = 0;
  static const auto environment = echelon::read_environment();
  if (weight.is_meta() || ++calls != 8) return;
  if (environment.rank != 1 || environment.generation > 0) return;
  static_cast<uint8_t*>(weight.mutable_data_ptr())[0] ^= 1;
}

}  // namespace

int main(int, char** arguments) {
  const std::string trouble = arguments[2];
  const bool hangs = trouble == "hangs";
  const bool flips = trouble == "flips";
  const bool replicas = flips || trouble == "none";
  echelon::LayerList layers;
  layers.add_function("troubled", [=](const torch::Tensor& values) {
    if (values.is_meta() || replicas) return values;
    hangs ? hang_after_a_second() : throw_in_the_sixth_step();
    return values;
  });
  layers.add(
      "head", [] { return torch::nn::Linear(16, 2); },
      [flips](auto& head, const torch::Tensor& values) {
        if (flips) flip_in_the_eighth_step(head.weight);
        return head.forward(values.flatten(1));
      });
  echelon::Job job;
  job.data.name = echelon::DataKind::dummy;
  job.data.samples = 64;
  job.data.holdout = 0;
  job.data.shape = {1, 4, 4};
  job.data.classes = 2;
  job.train.batch = replicas ? 6 : 4;
  job.train.steps = hangs ? 1500 : 20;
  job.train.check_replicas_every = 5;
  job.checkpoint.every_steps = replicas ? 6 : 0;
  auto world = echelon::World::from_environment();
  job.layout.dp_replicate = world.size();
  echelon::train(job, world, arguments[1], &layers);
}
