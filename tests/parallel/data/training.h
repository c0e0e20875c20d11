// One training loop for one device and for several ranks.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "echelon/comm/differentiable.h"
#include "echelon/comm/world.h"
#include "echelon/parallel/data/distributed_data_parallel.h"
#include "tests/parallel/data/nets.h"
#include "tests/support/parity.h"
#include "tests/support/ranks.h"

namespace echelon::training {

struct Plan {
  int steps = 4;
  int microbatches = 1;
  int64_t batch = 12;           // of all ranks, of one microbatch
  std::vector<int64_t> shares;  // of each microbatch, by rank; empty: even
  bool clear = true;            // gradients to none (else to zero)
  DistributedDataParallelOptions options{
      // Small, so that these networks have buckets of both kinds.
      .bucket_bytes = 600,
      .first_bucket_bytes = 200,
      .in_place_bytes = 1000};
};

struct Batch {
  torch::Tensor x, y;
};

inline Batch batch_of(const Plan& plan, int step, int microbatch) {
  const uint64_t seed = 1000 * step + 10 * microbatch;
  return {
      parity::random({plan.batch, 6}, seed),
      parity::random({plan.batch, 4}, seed + 1)};
}

inline torch::Tensor
loss_sum(const torch::Tensor& out, const torch::Tensor& y) {
  return (out - y).square().sum();
}

inline torch::optim::SGD optimizer_of(torch::nn::Module& module) {
  return torch::optim::SGD(
      module.parameters(),
      torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01));
}

inline void zero(torch::optim::Optimizer& optimizer, const Plan& plan) {
  optimizer.zero_grad(/*set_to_none=*/plan.clear);
}

/// The mean over all samples of a step, on one device.
template <class Net>
parity::Record on_one_device(
    Net net, const Plan& plan,
    const std::function<torch::Tensor(Net&, const torch::Tensor&)>& forward =
        [](Net& net, const torch::Tensor& x) { return net->forward(x); }) {
  parity::Record record;
  auto optimizer = optimizer_of(*net);
  for (int step = 0; step < plan.steps; ++step) {
    zero(optimizer, plan);
    double loss = 0;
    for (int m = 0; m < plan.microbatches; ++m) {
      const auto [x, y] = batch_of(plan, step, m);
      const auto mean = loss_sum(forward(net, x), y) /
                        static_cast<double>(plan.batch * plan.microbatches);
      mean.backward();
      loss += mean.template item<double>();
    }
    record.step(*net, loss);
    optimizer.step();
  }
  record.end(*net);
  return record;
}

inline std::vector<int64_t> shares_of(const Plan& plan, int size) {
  return plan.shares.empty() ? even_split(plan.batch, size) : plan.shares;
}

inline Batch
own_part(const Batch& batch, const Plan& plan, const Group& group) {
  const auto shares = shares_of(plan, group.size());
  const int64_t begin = std::accumulate(
      shares.begin(), shares.begin() + group.rank(), int64_t{0});
  return {
      batch.x.narrow(0, begin, shares[group.rank()]),
      batch.y.narrow(0, begin, shares[group.rank()])};
}

/// The same on the ranks of `group`, each with its share of every microbatch.
template <class Net>
parity::Record on_ranks(
    Net net, const Group& group, const Plan& plan,
    const std::function<torch::Tensor(
        DistributedDataParallel<Net>&, const torch::Tensor&)>& forward =
        [](auto& ddp, const torch::Tensor& x) { return ddp(x); }) {
  parity::Record record;
  DistributedDataParallel<Net> ddp(net, group, plan.options);
  auto optimizer = optimizer_of(*net);
  const int64_t own = shares_of(plan, group.size())[group.rank()];
  for (int step = 0; step < plan.steps; ++step) {
    zero(optimizer, plan);
    torch::Tensor loss = torch::zeros({1}, torch::kFloat64);
    for (int m = 0; m < plan.microbatches; ++m) {
      const auto [x, y] = own_part(batch_of(plan, step, m), plan, group);
      const auto mean = ddp.global_mean(
          loss_sum(forward(ddp, x), y), own * plan.microbatches);
      if (m + 1 < plan.microbatches) {
        const auto guard = ddp.no_sync();
        mean.backward();
      } else {
        mean.backward();
      }
      loss += mean.detach();
    }
    if (group.size() > 1) group.all_reduce(loss, ReduceOp::avg).wait();
    record.step(*net, loss.template item<double>());
    optimizer.step();
  }
  record.end(*net);
  return record;
}

template <class Net>
Net with_values(Net net, uint64_t seed) {
  parity::give_values(*net, seed);
  return net;
}

/// The plan's options, with each gradient reduced in its place.
inline DistributedDataParallelOptions all_in_place() {
  auto options = Plan().options;
  options.in_place_bytes = 1;
  return options;
}

/// Calls body(world, net, ddp) on each of `size` ranks: a network of the same
/// values everywhere, and its wrapper.
template <class Net, class Body>
void with_ddp(
    int size, const DistributedDataParallelOptions& options, const Body& body) {
  run_ranks(size, [&](World& world) {
    auto net = with_values(Net(), 3);
    DistributedDataParallel<Net> ddp(net, world.group(), options);
    body(world, net, ddp);
  });
}
template <class Net, class Body>
void with_ddp(int size, const Body& body) {
  with_ddp<Net>(size, {}, body);
}

/// Expects what rank 0 has.
inline void expect_same_on_all_ranks(
    World& world, const torch::Tensor& tensor, const std::string& name = "") {
  torch::Tensor first = tensor.detach().clone();
  world.group().broadcast(first, 0).wait();
  EXPECT_TRUE(first.equal(tensor)) << name;
}

/// Trains `Net` both ways; ranks other than 0 start from other values.
template <class Net>
void expect_parity(
    const Ranks& ranks, const Plan& plan,
    double tolerance = parity::kRounding) {
  const auto expected = on_one_device(with_values(Net(), 3), plan);
  ranks.run([&](World& world) {
    const auto actual = on_ranks(
        with_values(Net(), world.rank() == 0 ? 3 : 50 + world.rank()),
        world.group(), plan);
    SCOPED_TRACE("rank " + std::to_string(world.rank()));
    parity::expect_parity(expected, actual, tolerance);
  });
}

}  // namespace echelon::training
