// Data parallel training with a model and a loop of one's own.
//
//   echelon run -n 2 -- build/bin/01_data_parallel
//   [0] 2 ranks over local
//   [0] step  20  loss 0.17…
//   …
//   [0] step 100  loss 0.03…
//
// Every rank has the whole model and its own part of each batch; the wrapper
// averages gradients while backward runs, so all ranks stay equal.
#include <torch/torch.h>

#include <iostream>

#include "echelon/comm/world.h"
#include "echelon/parallel/data/distributed_data_parallel.h"

struct NetImpl : torch::nn::Module {
  NetImpl() {
    fc1 = register_module("fc1", torch::nn::Linear(16, 64));
    fc2 = register_module("fc2", torch::nn::Linear(64, 2));
  }
  torch::Tensor forward(torch::Tensor x) { return fc2(torch::relu(fc1(x))); }
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
};
TORCH_MODULE(Net);

int main() {
  // Who am I, how many are we: from the launcher; without one, a single rank.
  auto world = echelon::World::from_environment();
  if (world.rank() == 0) {
    std::cout << world.size() << " ranks over " << world.backend() << std::endl;
  }

  Net net;
  net->to(world.device());
  // Rank 0's parameters go to everybody; from here on gradients are averaged.
  echelon::DistributedDataParallel<Net> parallel(net, world.group());
  torch::optim::SGD optimizer(
      net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));

  torch::manual_seed(1 + world.rank());  // other samples on each rank
  for (int step = 1; step <= 100; ++step) {
    const auto x = torch::randn({64, 16}, world.device());
    const auto y = (x.sum(1) > 0).to(torch::kLong);
    optimizer.zero_grad();
    const auto loss = torch::nn::functional::cross_entropy(parallel(x), y);
    loss.backward();
    optimizer.step();

    if (step % 20 == 0) {
      auto mean = loss.detach().clone();
      world.group().all_reduce(mean, echelon::ReduceOp::avg);
      if (world.rank() == 0) {
        std::printf("step %3d  loss %.4f\n", step, mean.item<float>());
      }
    }
  }
}
