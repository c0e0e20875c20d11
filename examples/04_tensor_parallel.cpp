// A model of one's own whose matrices are sharded over the ranks, beside data
// parallelism: the mesh is dp x tp, and every mesh computes the same.
//
//   build/bin/echelon run -n 2 -- build/bin/04_tensor_parallel tp=2
//   build/bin/echelon run -n 4 -- build/bin/04_tensor_parallel dp=2,tp=2
//   build/bin/04_tensor_parallel               # one rank, and the same losses
#include <torch/torch.h>

#include <cstdio>

#include "echelon/comm/mesh_groups.h"
#include "echelon/layers/sharded_module.h"
#include "echelon/parallel/data/distributed_data_parallel.h"
#include "echelon/parallel/tensor/linear.h"

using torch::Tensor;

constexpr int64_t kBatch = 64;  // of all data-parallel ranks together

// Y = gelu(X A) B. The first matrix is sharded by its columns, so that each
// rank has some of the hidden features; the second by its rows, so that each
// rank has a part of the sum. One all-reduce forward, one backward.
struct Net : torch::nn::Module {
  explicit Net(const echelon::TensorParallel& tensor) {
    in = register_module(
        "in", std::make_shared<echelon::ColumnParallelLinear>(
                  echelon::LinearShape{.in = 16, .out = 101}, tensor, "in"));
    out = register_module(
        "out", std::make_shared<echelon::RowParallelLinear>(
                   echelon::LinearShape{.in = 101, .out = 1}, tensor, "out"));
  }
  Tensor forward(const Tensor& x) {
    return out->forward(torch::gelu(in->forward(x)));
  }
  std::shared_ptr<echelon::ColumnParallelLinear> in;
  std::shared_ptr<echelon::RowParallelLinear> out;
};

int main(int argc, char** argv) {
  auto world = echelon::World::from_environment();
  const auto layout = echelon::parse_layout(argc > 1 ? argv[1] : "dp=1");
  const echelon::MeshGroups mesh(world, layout);
  const echelon::TensorParallel tensor{.group = mesh.along(echelon::Axis::tp)};

  auto net = std::make_shared<Net>(tensor);
  // First values by seed and name, whatever part of a matrix is here.
  echelon::initialize_shards(*net, "", /*seed=*/1);
  net->to(world.device());
  // Ranks with the same part and other samples average their gradients.
  echelon::DistributedDataParallel<std::shared_ptr<Net>> parallel(
      net, mesh.data());
  torch::optim::Adam optimizer(net->parameters(), 3e-3);

  const int64_t rows = kBatch / mesh.data().size();
  for (int step = 0; step < 60; ++step) {
    // The same samples on all ranks; each data-parallel rank takes its part.
    const auto phase = 1000.0 * step;
    const Tensor all =
        torch::sin(torch::arange(kBatch * 16) * 1.7 + phase).view({kBatch, 16});
    const Tensor x =
        all.narrow(0, mesh.data_index() * rows, rows).to(world.device());
    optimizer.zero_grad();
    const Tensor loss =
        torch::mse_loss(parallel(x), x.sum(1, /*keepdim=*/true));
    loss.backward();
    optimizer.step();
    if (step % 20 == 19) {
      const Tensor mean = loss.detach().clone();
      mesh.data().all_reduce(mean, echelon::ReduceOp::avg);
      if (world.rank() == 0) {
        std::printf("step %d: loss %.6f\n", step + 1, mean.item<double>());
      }
    }
  }
}
