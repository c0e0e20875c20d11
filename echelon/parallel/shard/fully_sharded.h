// Sharded data parallelism for any module: say which submodules are units.
//
//   FullyShardedDataParallel<Net> sharded(
//       net, {.shard = world.group(), .units = {"blocks.0", "blocks.1"}});
//   std::vector<ParameterGroup> groups(2);
//   groups[0].weight_decay = 0.01;
//   for (auto& shard : sharded.units().flat_shards()) {
//     groups[shard.decays ? 0 : 1].parameters.emplace_back(
//         shard.name, shard.tensor);
//   }
//   auto optimizer = make_optimizer(options, groups);
//   auto loss = cross_entropy(sharded(x), y);
//   loss.backward();          // shards have the mean of the gradients
//   optimizer->step();
//   sharded.after_update();
//
// The module stays as it is: a unit's parameters are gathered when an operator
// first reads one of them, in forward and in backward, and freed when other
// units are used. Parameters that no unit has are one more unit. Names of units
// may end with a star: "blocks.*" is each child of blocks.
//
// Source: Zhao et al., "PyTorch FSDP", 2023, arXiv:2304.11277.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "echelon/comm/group.h"
#include "echelon/parallel/shard/sharded_units.h"

namespace echelon {

struct FullyShardedOptions {
  Group shard = Group::alone("dp_shard");
  Group replicate = Group::alone("dp_replicate");
  /// Names of submodules. Throws ConfigError for one that matches no submodule
  /// (the nearest is named), lies inside another unit, has no parameters, or
  /// has one of another unit.
  std::vector<std::string> units;
  ShardedUnitsOptions sharding;
  /// Give all ranks rank 0's values; else they are equal already.
  bool broadcast_values = true;
};

/// What FullyShardedDataParallel does, without the type of the module.
class FullyShardedModule {
 public:
  FullyShardedModule(torch::nn::Module& module, FullyShardedOptions options);
  ~FullyShardedModule();
  FullyShardedModule(const FullyShardedModule&) = delete;
  FullyShardedModule& operator=(const FullyShardedModule&) = delete;

  /// While it lives, operators of this thread that read a parameter gather it.
  class Reading {
   public:
    ~Reading();
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;

   private:
    friend class FullyShardedModule;
    struct Impl;
    explicit Reading(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
  };
  std::unique_ptr<Reading> read();
  /// `output`: backward from it ends with finish(), so that gradients of
  /// several backwards add up in the shards until after_update().
  void watch(const torch::Tensor& output);

  struct Impl;
  /// While it lives backward leaves gradients whole and on this rank; the first
  /// one after it reduces their sum. What counts is where backward runs.
  class NoSync {
   public:
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    friend class FullyShardedModule;
    explicit NoSync(std::shared_ptr<Impl> impl);
    std::shared_ptr<Impl> impl_;
  };
  [[nodiscard]] std::unique_ptr<NoSync> no_sync();

  /// See ShardedUnits.
  void after_update(bool updated = true);
  ShardedUnits& units();

 private:
  std::shared_ptr<Impl> impl_;
};

/// Every rank of both groups makes one and makes the same calls. The module's
/// control flow must be the same on all ranks. Not with create_graph.
template <class Module>
class FullyShardedDataParallel : public FullyShardedModule {
 public:
  FullyShardedDataParallel(
      std::shared_ptr<Module> module, FullyShardedOptions options)
      : FullyShardedModule(*module, std::move(options)),
        module_(std::move(module)) {}

  /// module->forward(arguments…). Of what it returns tensors, and tuples and
  /// vectors of them, are watched.
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    const auto reading = read();
    auto output = module_->forward(std::forward<Arguments>(arguments)...);
    watch_all(output);
    return output;
  }

  Module& module() { return *module_; }

 private:
  void watch_all(const torch::Tensor& output) { watch(output); }
  template <class... Outputs>
  void watch_all(const std::tuple<Outputs...>& outputs) {
    std::apply([&](const auto&... one) { (watch_all(one), ...); }, outputs);
  }
  void watch_all(const std::vector<torch::Tensor>& outputs) {
    for (const auto& one : outputs) watch(one);
  }
  template <class T>
  requires(!std::is_convertible_v<const T&, torch::Tensor>) void watch_all(
      const T&) {}

  std::shared_ptr<Module> module_;
};

}  // namespace echelon
