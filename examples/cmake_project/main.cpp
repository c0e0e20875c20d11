// Learns which of two spirals a point lies on, on any number of ranks: the
// result does not depend on how many.
//
//   $ echelon run -n 2 -- build/program
//   [0] step   1  loss 0.612512
//   [0] step 200  loss 0.000127
//   [0] rank 0 of 2: gradient norm 0.000303931
//   [1] rank 1 of 2: gradient norm 0.000303931
#include <torch/torch.h>

#include <cmath>
#include <cstdio>

#include "echelon/comm/world.h"
#include "echelon/parallel/data/distributed_data_parallel.h"

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    return out(torch::tanh(hidden(torch::tanh(in(x)))));
  }
  torch::nn::Linear in = register_module("in", torch::nn::Linear(2, 32));
  torch::nn::Linear hidden =
      register_module("hidden", torch::nn::Linear(32, 32));
  torch::nn::Linear out = register_module("out", torch::nn::Linear(32, 2));
};
TORCH_MODULE(Net);

int main() {
  constexpr int64_t kBatch = 256;  // of all ranks
  auto world = echelon::World::from_environment();
  torch::manual_seed(0);  // the same points everywhere, each rank takes a part
  const auto parts = torch::arange(kBatch).tensor_split(world.size());
  const auto own = parts[world.rank()].to(world.device());

  Net net;
  net->to(world.device(), torch::kFloat64);
  echelon::DistributedDataParallel<Net> parallel(net, world.group());
  torch::optim::Adam optimizer(net->parameters(), 0.01);

  for (int step = 1; step <= 200; ++step) {
    const auto t = 3 * torch::rand({kBatch}, torch::kFloat64) + 0.5;
    const auto label = torch::arange(kBatch) % 2;
    const auto angle = t + label * M_PI;
    const auto points =
        torch::stack({t * angle.cos(), t * angle.sin()}, 1).to(world.device());

    optimizer.zero_grad();
    auto loss = torch::nn::functional::cross_entropy(
        parallel(points.index_select(0, own)),
        label.to(world.device()).index_select(0, own),
        torch::nn::functional::CrossEntropyFuncOptions().reduction(
            torch::kSum));
    loss = parallel.global_mean(loss, own.numel());
    loss.backward();  // averages the gradients over the ranks while it runs
    optimizer.step();

    if (step == 1 || step == 200) {
      auto mean = loss.detach().clone();
      world.group().all_reduce(mean, echelon::ReduceOp::avg);
      if (world.rank() == 0) {
        std::printf("step %3d  loss %.6f\n", step, mean.item<double>());
      }
    }
  }
  std::printf(
      "rank %d of %d: gradient norm %.9f\n", world.rank(), world.size(),
      net->in->weight.grad().norm().item<double>());
}
