// Fits y = 2x + 1 on any number of ranks: each draws its own samples, and the
// mean gradient over all ranks moves the same model everywhere.
//
//   $ echelon run -n 2 -- ./fit_line
//   2 ranks: y = 2.00 x + 1.00, loss 0.0000
#include <torch/torch.h>

#include <cstdio>
#include <exception>

#include "echelon/comm/world.h"

int main() try {
  auto world = echelon::World::from_environment();
  torch::manual_seed(world.rank());  // other samples on each rank
  torch::nn::Linear line(1, 1);
  for (auto& parameter : line->parameters()) {
    world.group().broadcast(parameter.data(), 0).wait();
  }
  torch::optim::SGD optimizer(line->parameters(), 0.1);

  double loss = 0;
  for (int step = 0; step < 200; ++step) {
    const auto x = torch::randn({32, 1});
    const auto error = torch::mse_loss(line(x), 2 * x + 1);
    optimizer.zero_grad();
    error.backward();
    for (auto& parameter : line->parameters()) {
      world.group()
          .all_reduce(parameter.grad(), echelon::ReduceOp::avg)
          .wait();
    }
    optimizer.step();
    loss = error.item<double>();
  }
  if (world.rank() == 0) {
    std::printf(
        "%d ranks: y = %.2f x + %.2f, loss %.4f\n",
        world.size(),
        line->weight.item<double>(),
        line->bias.item<double>(),
        loss);
  }
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
