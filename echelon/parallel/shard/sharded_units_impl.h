// The state of ShardedUnits, for the .cpp files of this room alone.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "echelon/layers/parameter_owner.h"
#include "echelon/memory/saved_tensors.h"
#include "echelon/parallel/shard/units.h"

namespace echelon {

struct ShardedUnits::Impl : std::enable_shared_from_this<Impl>, ParameterOwner {
  /// Where a parameter is stored.
  struct Location {
    size_t unit = 0;
    size_t flat = 0;
    size_t parameter = 0;  // of the flat buffer
  };

  Impl(Group shard, Group replicate, ShardedUnitsOptions options)
      : shard(std::move(shard)),
        replicate(std::move(replicate)),
        options(std::move(options)) {}
  ~Impl() override;

  torch::Tensor gradient_of(const torch::Tensor& weight) override;
  torch::Tensor with_zero_rows(const torch::Tensor& matrix) override;
  /// The flat buffer with the memory of `tensor`, and its unit; null if none.
  std::pair<sharding::Unit*, sharding::FlatBuffer*>
  find(const torch::Tensor& tensor) const;

  // Called when the first unit tells which device the parameters are on.
  void start(torch::Device device);
  void check(
      const std::string& name,
      const sharding::FlatBuffer::Named& parameters) const;
  void watch_gradients(size_t unit);
  void on_gradient(const Location& location);
  // Both return when the set's units are unsharded.
  void use(size_t set);
  void use_in_backward(size_t set);

  // Tells every flat buffer that its values `changed`. Then unshards those that
  // are kept unsharded or pinned; the others stay resharded.
  void refresh(void (sharding::FlatBuffer::*changed)());

  bool unshards_in_backward() const { return !unsharded->keeps(); }

  const Group shard;
  const Group replicate;
  const ShardedUnitsOptions options;
  std::recursive_mutex mutex;
  std::unique_ptr<sharding::ShardContext> context;
  std::unique_ptr<sharding::ShardContext> apart;  // of options.apart
  sharding::Units units;
  std::unique_ptr<sharding::UnshardedUnits> unsharded;
  std::unique_ptr<sharding::UnitReducer> reducer;
  std::unordered_map<const c10::StorageImpl*, size_t> unit_of;
  std::vector<Location> added;  // in the order of the calls of add()
};

namespace sharding {

/// Saves no values of a parameter for backward, which unshards its unit
/// instead.
class UnshardWhenUnpacked : public SavedTensorHooks {
 public:
  /// `set`: the set that the forward used; none: any parameter may be saved.
  UnshardWhenUnpacked(
      std::weak_ptr<ShardedUnits::Impl> impl, std::optional<size_t> set)
      : impl_(std::move(impl)), set_(set) {}

  std::function<torch::Tensor()> pack(const torch::Tensor& tensor) override;

 private:
  std::weak_ptr<ShardedUnits::Impl> impl_;
  std::optional<size_t> set_;
};

}  // namespace sharding
}  // namespace echelon
