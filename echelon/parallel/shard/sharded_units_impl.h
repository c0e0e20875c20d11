// What ShardedUnits holds; for the files of this room alone.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "echelon/memory/saved_tensors.h"
#include "echelon/parallel/shard/unit_reducer.h"

namespace echelon {

struct ShardedUnits::Impl : std::enable_shared_from_this<Impl> {
  Impl(Group shard, Group replicate, ShardedUnitsOptions options)
      : shard(std::move(shard)),
        replicate(std::move(replicate)),
        options(std::move(options)) {}

  // Once the first unit says which device they are on.
  void start(torch::Device device);
  void check(
      const std::string& name,
      const sharding::FlatBuffer::Named& parameters) const;
  void watch_gradients(size_t unit);
  void on_gradient(size_t unit, size_t flat, size_t parameter);
  // The set's units are gathered when it returns.
  void use(size_t set);
  void use_in_backward(size_t set);

  // Whole parameters that are kept come anew, others are forgotten.
  void renew(void (sharding::FlatBuffer::*changed)());

  // Parameters have to be gathered for backward.
  bool gathers_again() const { return !gathered->keeps(); }
  std::vector<size_t> all() const;

  const Group shard;
  const Group replicate;
  const ShardedUnitsOptions options;
  std::recursive_mutex mutex;
  std::unique_ptr<sharding::Surroundings> surroundings;
  sharding::Units units;
  std::unique_ptr<sharding::GatheredUnits> gathered;
  std::unique_ptr<sharding::UnitReducer> reducer;
  std::unordered_map<const c10::StorageImpl*, size_t> unit_of;
  // What was added, in that order: unit, flat buffer, parameter.
  std::vector<std::tuple<size_t, size_t, size_t>> added;
};

namespace sharding {

/// Keeps of a saved parameter its place alone; backward gathers it.
class GatherWhenUnpacked : public SavedTensorHooks {
 public:
  /// `set`: that its user gathered; none: whatever is saved.
  GatherWhenUnpacked(
      std::weak_ptr<ShardedUnits::Impl> impl, std::optional<size_t> set)
      : impl_(std::move(impl)), set_(set) {}

  std::function<torch::Tensor()> pack(const torch::Tensor& tensor) override;

 private:
  std::weak_ptr<ShardedUnits::Impl> impl_;
  std::optional<size_t> set_;
};

}  // namespace sharding
}  // namespace echelon
