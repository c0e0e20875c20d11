// One training loop for one device and for sharded parameters.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "echelon/comm/differentiable.h"
#include "echelon/comm/world.h"
#include "echelon/layers/network.h"
#include "echelon/optim/optimizer.h"
#include "tests/parallel/pipeline/nets.h"
#include "tests/parallel/shard/parts.h"
#include "tests/support/parity.h"
#include "tests/support/ranks.h"

namespace echelon::sharding_test {

using torch::Tensor;
using Forward = std::function<Tensors(const Tensors&)>;
using Parameters = std::vector<std::pair<std::string, Tensor>>;

struct Plan {
  LayerList list = nets::mlp();
  ShardedUnitsOptions options;
  int replicate = 1;  // replicas of the sharded model
  int steps = 3;
  int microbatches = 1;
  bool keep_unsharded = false;
  int64_t rows = 7;       // of a microbatch, over all ranks
  bool evaluate = false;  // between the steps
  OptimizerKind optimizer = OptimizerKind::sgd;
  torch::Device device = torch::kCPU;  // of the network and its inputs
  /// Changes the network before it is sharded.
  std::function<void(Network&)> prepare = [](Network&) {};
  /// Wraps the forward of each layer.
  std::function<Forward(Forward)> around = [](Forward forward) {
    return forward;
  };
  std::function<Tensor(int step, int microbatch)> input =
      [](int step, int microbatch) { return Tensor(); };
};

inline Plan with_stage(int stage) {
  Plan plan;
  plan.options.shard.stage = stage;
  return plan;
}

inline Tensor rows_of(const Plan& plan, int step, int microbatch) {
  const Tensor given = plan.input(step, microbatch);
  if (given.defined()) return given.to(plan.device);
  return parity::random(
             {plan.rows, 6}, 1000 * static_cast<uint64_t>(step) + microbatch)
      .to(plan.device);
}

/// This rank's share of them.
inline Tensor
own_rows_of(const Plan& plan, const World& world, int step, int microbatch) {
  const auto own = even_range(plan.rows, world.rank(), world.size());
  return rows_of(plan, step, microbatch).narrow(0, own.begin, own.size());
}

inline Tensor loss_sum(const Tensors& outputs, const Tensor& x) {
  const Tensor out = outputs[0];
  // A target that depends on the sample alone.
  const Tensor target =
      x.to(torch::kFloat64).flatten(1).mean(1).view({-1}).sin();
  return (out.flatten(1).to(torch::kFloat64) - target.view({-1, 1}))
             .square()
             .sum() /
         static_cast<double>(out[0].numel());
}

inline OptimizerOptions optimizer_options(const Plan& plan) {
  OptimizerOptions options;
  options.name = plan.optimizer;
  options.learning_rate = plan.optimizer == OptimizerKind::sgd ? 0.05 : 0.01;
  options.momentum = 0.9;
  options.weight_decay = 0.1;
  return options;
}

/// Parameters of layer `index`, by their names in the list.
inline Parameters parameters_of(Network& network, size_t index) {
  Parameters own;
  for (const auto& item : network.named_parameters()) {
    if (item.key().starts_with(network.layers()[index].name + ".")) {
      own.emplace_back(item.key(), item.value());
    }
  }
  return own;
}

inline std::shared_ptr<Network> build(const Plan& plan) {
  auto network = build_network(plan.list, 0, plan.list.size(), 5);
  network->to(plan.device, torch::kFloat64);
  plan.prepare(*network);
  return network;
}

inline parity::Record on_one_device(const Plan& plan) {
  auto network = build(plan);
  auto optimizer = make_optimizer(optimizer_options(plan), *network);
  parity::Record record;
  for (int step = 0; step < plan.steps; ++step) {
    optimizer->zero_grad();
    double loss = 0;
    for (int m = 0; m < plan.microbatches; ++m) {
      const Tensor x = rows_of(plan, step, m);
      const Tensor mean = loss_sum(network->forward(Tensors{x}), x) /
                          static_cast<double>(plan.rows * plan.microbatches);
      mean.backward();
      loss += mean.item<double>();
    }
    record.step(*network, loss);
    optimizer->step();
  }
  record.end(*network);
  return record;
}

/// A network whose layers are units.
struct ShardedNet {
  ShardedNet(
      std::shared_ptr<Network> built, Group shard, Group replicate,
      const Plan& plan, bool equal = true)
      : network(std::move(built)),
        units(std::move(shard), std::move(replicate), plan.options) {
    std::map<size_t, size_t> unit_of_layer;
    for (size_t i = 0; i < network->layers().size(); ++i) {
      std::vector<size_t> used;
      const auto own = parameters_of(*network, i);
      if (!own.empty()) {
        used.push_back(units.add(network->layers()[i].name, own, equal));
        unit_of_layer[i] = used.back();
      }
      for (const auto& tie : plan.list.ties()) {
        if (plan.list.layer_of_parameter(tie.second) != i) continue;
        used.push_back(
            unit_of_layer.at(plan.list.layer_of_parameter(tie.first)));
      }
      forwards.push_back(plan.around(
          units.wrap(std::move(used), network->layers()[i].forward)));
    }
  }

  /// Sharded over all ranks.
  ShardedNet(World& world, const Plan& plan)
      : ShardedNet(
            build(plan), world.group(), Group::alone("dp_replicate"), plan) {}

  Tensors forward(Tensors tensors) const {
    for (const auto& forward : forwards) tensors = forward(tensors);
    return tensors;
  }

  std::unique_ptr<Optimizer> optimizer(const Plan& plan) const {
    const auto options = optimizer_options(plan);
    return make_optimizer(options, units.parameter_groups(options.decay()));
  }

  std::shared_ptr<Network> network;
  ShardedUnits units;
  std::vector<Forward> forwards;
};

/// This rank's groups: consecutive ranks share a set of shards.
struct Groups {
  Groups(World& world, int num_replicas)
      : shard(world.group()), replicate(Group::alone("dp_replicate")) {
    if (num_replicas == 1) return;
    const int size = world.size() / num_replicas;
    std::vector<int> own(size), others(num_replicas);
    std::iota(own.begin(), own.end(), world.rank() / size * size);
    for (int i = 0; i < num_replicas; ++i) {
      others[i] = i * size + world.rank() % size;
    }
    shard = world.new_group("dp_shard", own);
    replicate = world.new_group("dp_replicate", others);
  }
  Group shard, replicate;
};

/// Runs one step's microbatches on this rank's samples; returns the global
/// loss.
inline double forward_backward(
    ShardedNet& sharded, const Plan& plan, World& world, int step) {
  Tensor loss = torch::zeros({1}, torch::kFloat64);
  for (int m = 0; m < plan.microbatches; ++m) {
    const Tensor x = own_rows_of(plan, world, step, m);
    const Tensor mean = loss_sum(sharded.forward({x}), x) *
                        (static_cast<double>(world.size()) /
                         static_cast<double>(plan.rows * plan.microbatches));
    sharded.units.begin_backward(
        {.last = m + 1 == plan.microbatches,
         .keep_unsharded = plan.keep_unsharded});
    mean.backward();
    loss += mean.item<double>();
  }
  sharded.units.finish();
  world.group().all_reduce(loss, ReduceOp::avg);
  return loss.item<double>();
}

inline void expect_parity_on(
    World& world, const Plan& plan, const parity::Record& expected,
    double tolerance) {
  SCOPED_TRACE("rank " + std::to_string(world.rank()));
  const Groups groups(world, plan.replicate);
  ShardedNet sharded(build(plan), groups.shard, groups.replicate, plan);
  auto optimizer = sharded.optimizer(plan);
  for (int step = 0; step < plan.steps; ++step) {
    const double loss = forward_backward(sharded, plan, world, step);
    EXPECT_NEAR(
        loss, expected.losses[step],
        tolerance * std::abs(expected.losses[step]));
    expect_parts(
        "step " + std::to_string(step) + " gradient of",
        expected.gradients[step], sharded.units, groups.shard, Which::gradients,
        tolerance);
    optimizer->step();
    sharded.units.after_update();
    if (plan.evaluate) {
      const torch::NoGradGuard no_grad;
      sharded.forward({rows_of(plan, step, 0)});
    }
  }
  expect_parts(
      "parameter", expected.parameters, sharded.units, groups.shard,
      Which::values, tolerance);
  // The unsharded parameters agree as well.
  const auto gathered = sharded.units.unshard();
  for (const auto& item : sharded.network->named_parameters()) {
    const Tensor& whole = expected.parameters.at(item.key());
    EXPECT_LE(
        parity::detail::largest(
            item.value().detach().to(torch::kCPU, torch::kFloat64) - whole),
        tolerance * std::max(parity::detail::largest(whole), 1e-2))
        << item.key();
  }
}

/// The number of collectives of each label that began since `from`.
using Counts = std::map<std::string, int>;

inline std::vector<CollectiveRecord>
records_since(const World& world, uint64_t from) {
  const auto all = world.history().snapshot();
  return {
      all.end() - static_cast<std::ptrdiff_t>(world.history().count() - from),
      all.end()};
}

inline Counts labels_since(
    const World& world, uint64_t from, const std::string& prefix = "") {
  Counts counts;
  for (const auto& record : records_since(world, from)) {
    if (!record.label.empty() && record.label.starts_with(prefix)) {
      ++counts[record.label];
    }
  }
  return counts;
}

inline constexpr double kTolerance = 1e-10;

/// Trains on one device, and on `ranks` with sharded parameters.
inline void expect_parity(
    const Ranks& ranks, const Plan& plan, double tolerance = kTolerance) {
  const auto expected = on_one_device(plan);
  ranks.run([&](World& world) {
    expect_parity_on(world, plan, expected, tolerance);
  });
}

}  // namespace echelon::sharding_test
