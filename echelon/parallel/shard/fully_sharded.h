// Sharded data parallelism for any module: name the submodules that are units.
//
//   FullyShardedDataParallel<Net> sharded(
//       net, {.shard = world.group(), .units = {"blocks.*"}});
//   auto optimizer =
//       make_optimizer({.name = "adamw"}, sharded.parameter_groups(0.01));
//   for (…) {
//     cross_entropy(sharded(x), y).backward();  // shards have mean gradients
//     optimizer->step();
//     sharded.after_update();                   // drops the gradients
//   }
//
// For an optimizer of torch::optim use sharded.parameters().
//
// The module is not changed. A unit's parameters are all-gathered when an
// operator first reads one of them, in forward and in backward, and freed when
// other units are used. The parameters that no named unit has form one more
// unit. A name may end with a star: "blocks.*" names each child of blocks.
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
  /// The ranks that parameters are sharded over, and the ranks that hold the
  /// same shard (hybrid sharding).
  Group shard = Group::alone("dp_shard");
  Group replicate = Group::alone("dp_replicate");
  /// Names of submodules. The constructor throws ConfigError for a name that
  /// matches no submodule (it tells the nearest), lies inside another unit, has
  /// no parameters, or has a parameter of another unit.
  std::vector<std::string> units;
  ShardedUnitsOptions sharding;
  /// Start from rank 0's parameters and buffers; false: all ranks have the
  /// same.
  bool broadcast_values = true;
};

/// All of FullyShardedDataParallel that does not depend on the module's type.
class FullyShardedModule {
 public:
  FullyShardedModule(torch::nn::Module& module, FullyShardedOptions options);
  ~FullyShardedModule();
  FullyShardedModule(const FullyShardedModule&) = delete;
  FullyShardedModule& operator=(const FullyShardedModule&) = delete;

  /// This rank's shards for make_optimizer, as two groups: shards of parameters
  /// with two and more dimensions decay by `weight_decay`, the others do not.
  /// Each unit gives one or two flat tensors, which take the place of its
  /// parameters. Call once, after construction.
  std::vector<ParameterGroup> parameter_groups(double weight_decay = 0) const;
  /// The tensors of parameter_groups(), for torch::optim.
  std::vector<torch::Tensor> parameters() const;

  /// Call on every rank after the optimizer's step: drops the gradients and
  /// reshards, so that the next forward sees the new values. Pass `updated`
  /// false when the step was skipped.
  void after_update(bool updated = true);

  /// While the result lives, backward leaves gradients unsharded and on this
  /// rank; the first backward after it reduces the sum. What counts is where
  /// backward runs.
  [[nodiscard]] std::shared_ptr<void> no_sync();

  /// For a forward that you call yourself: while the result lives, operators of
  /// this thread that read a parameter unshard its unit first.
  [[nodiscard]] std::shared_ptr<void> begin_forward();
  /// Makes a backward from `output` end with the reduction. Gradients of
  /// several backwards add up in the shards until after_update().
  void watch(const torch::Tensor& output);

  /// For everything else: saving, loading, unsharded values.
  ShardedUnits& units();
  const ShardedUnits& units() const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

/// Every rank of both groups constructs one around the same model and makes the
/// same calls; the module's control flow must be the same on all ranks.
/// backward throws ConfigError with create_graph, and CommError when a peer is
/// lost.
template <class Module>
class FullyShardedDataParallel : public FullyShardedModule {
 public:
  FullyShardedDataParallel(
      std::shared_ptr<Module> module, FullyShardedOptions options)
      : FullyShardedModule(*module, std::move(options)),
        module_(std::move(module)) {}

  /// module->forward(arguments…). It may return a tensor, or tuples and vectors
  /// of tensors; other results are not watched.
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    const auto scope = begin_forward();
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
