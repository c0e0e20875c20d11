// A model of one's own, partitioned into as many pipeline stages as there are
// ranks.
//
//   build/bin/echelon run -n 3 -- build/bin/03_pipeline
//   build/bin/echelon run -n 2 -- build/bin/03_pipeline zb-h1
//   build/bin/03_pipeline                  # one rank, and the same losses
#include <torch/torch.h>

#include <cstdio>

#include "echelon/comm/world.h"
#include "echelon/layers/ties.h"
#include "echelon/parallel/pipeline/pipeline.h"
#include "echelon/schedule/options.h"

using torch::Tensor;

constexpr int kMicrobatches = 8;
constexpr int64_t kRows = 16;  // of a microbatch

struct BlockImpl : torch::nn::Module {
  BlockImpl() { fc = register_module("fc", torch::nn::Linear(32, 32)); }
  std::tuple<Tensor, Tensor> forward(const Tensor& x, const Tensor& skip) {
    return {torch::tanh(fc(x)), skip};
  }
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(Block);

// The first layer's output passes by the blocks to the last one.
echelon::LayerList model() {
  echelon::LayerList layers;
  layers.add(
      "in", [] { return torch::nn::Linear(8, 32); },
      [](auto& in, const Tensor& x) {
        const Tensor y = in.forward(x);
        return std::make_tuple(y, y);
      });
  for (const char* name : {"block.0", "block.1", "block.2", "block.3"}) {
    layers.add(name, [] { return Block(); });
  }
  layers.add(
      "out", [] { return torch::nn::Linear(32, 1); },
      [](auto& out, const Tensor& x, const Tensor& skip) {
        return out.forward(x + skip);
      });
  return layers;
}

// Samples that depend on the step and the microbatch alone. Learns the sum.
Tensor samples(int step, int64_t microbatch) {
  const auto n = static_cast<double>(kRows * 8);
  const auto phase = 1000.0 * step + 10.0 * static_cast<double>(microbatch);
  return torch::sin(torch::arange(n) * 1.7 + phase).view({kRows, 8});
}

int main(int argc, char** argv) {
  auto world = echelon::World::from_environment();
  const auto layers = model();
  const auto schedule = echelon::make_schedule(
      {.kind = echelon::schedule_kind(argc > 1 ? argv[1] : "1f1b"),
       .ranks = world.size(),
       .microbatches = kMicrobatches});
  const auto boundaries =
      echelon::partition_evenly(layers, schedule.num_stages());

  // Only this rank's layers are built; first values do not depend on the
  // partition.
  echelon::Pipeline pipeline(
      world.group(), schedule,
      echelon::build_stages(
          layers, boundaries, schedule.rank_of_stage, world.rank(), /*seed=*/1),
      {.device = world.device(),
       .ties = echelon::ties_across(layers, boundaries)});
  std::vector<Tensor> parameters;
  for (const auto& stage : pipeline.stages()) {
    for (const auto& item : stage.named_parameters()) {
      parameters.push_back(item.second);
    }
  }
  torch::optim::Adam optimizer(parameters, 3e-3);

  for (int step = 0; step < 60; ++step) {
    std::vector<echelon::Tensors> microbatches;
    for (int i = 0; i < kMicrobatches && pipeline.has_first_stage(); ++i) {
      microbatches.push_back({samples(step, i).to(world.device())});
    }
    optimizer.zero_grad();
    const auto result = pipeline.step(
        microbatches, [&](const echelon::Tensors& outputs, int64_t i) {
          const Tensor sums = samples(step, i).sum(1, /*keepdim=*/true);
          return torch::mse_loss(outputs[0], sums.to(world.device())) /
                 kMicrobatches;
        });
    optimizer.step();
    if (pipeline.has_last_stage() && step % 20 == 19) {
      const double loss = torch::stack(result.losses).sum().item<double>();
      std::printf("step %d: loss %.6f\n", step + 1, loss);
    }
  }
}
