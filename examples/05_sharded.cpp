// A model that no rank holds whole: parameters, gradients and the optimizer's
// state are sharded over the ranks, and the parameters of a block are unsharded
// only while it computes. Losses do not depend on the number of ranks.
//
//   build/bin/echelon run -n 2 -- build/bin/05_sharded
//   build/bin/05_sharded                       # one rank, and the same losses
#include <torch/torch.h>

#include <cstdio>

#include "echelon/comm/world.h"
#include "echelon/optim/optimizer.h"
#include "echelon/parallel/shard/fully_sharded.h"

using torch::Tensor;

constexpr int64_t kBatch = 64;  // of all ranks together
constexpr int64_t kWidth = 32;

struct BlockImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) { return x + out(torch::gelu(in(norm(x)))); }
  torch::nn::LayerNorm norm = register_module(
      "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
  torch::nn::Linear in =
      register_module("in", torch::nn::Linear(kWidth, 4 * kWidth));
  torch::nn::Linear out =
      register_module("out", torch::nn::Linear(4 * kWidth, kWidth));
};
TORCH_MODULE(Block);

struct Net : torch::nn::Module {
  Net() {
    for (int i = 0; i < 4; ++i) blocks->push_back(Block());
  }
  Tensor forward(const Tensor& x) { return head(blocks->forward(x)); }
  torch::nn::Sequential blocks =
      register_module("blocks", torch::nn::Sequential());
  torch::nn::Linear head =
      register_module("head", torch::nn::Linear(kWidth, 1));
};

int main() {
  auto world = echelon::World::from_environment();
  torch::manual_seed(0);
  auto net = std::make_shared<Net>();
  net->to(world.device());

  // Each block is a unit; the rest of the module, the head, is one more. From
  // here on a rank keeps its shard of each unit, and net->parameters() have no
  // values outside of forward and backward.
  echelon::FullyShardedDataParallel<Net> sharded(
      net, {.shard = world.group(), .units = {"blocks.*"}});
  auto optimizer = echelon::make_optimizer(
      {.name = echelon::OptimizerKind::adamw, .learning_rate = 1e-2},
      sharded.parameter_groups(1e-2));
  int64_t own = 0;
  for (const auto& shard : sharded.parameters()) own += shard.numel();
  std::printf("rank %d has %ld numbers\n", world.rank(), own);

  const int64_t rows = kBatch / world.size();
  for (int step = 1; step <= 60; ++step) {
    // Every rank draws the same samples and takes its share.
    const Tensor all = torch::randn({kBatch, kWidth});
    const Tensor x =
        all.narrow(0, world.rank() * rows, rows).to(world.device());
    const Tensor loss =
        torch::mse_loss(sharded(x), torch::sin(x).mean(1, /*keepdim=*/true));
    loss.backward();  // leaves the mean over all ranks in the shards
    optimizer->step();
    sharded.after_update();
    if (step % 20 == 0) {
      const Tensor mean = loss.detach().clone();
      world.group().all_reduce(mean, echelon::ReduceOp::avg);
      if (world.rank() == 0) {
        std::printf("step %d: loss %.6f\n", step, mean.item<double>());
      }
    }
  }
}
