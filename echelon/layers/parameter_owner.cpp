#include "echelon/layers/parameter_owner.h"

#include <torch/types.h>

#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

namespace echelon {
namespace {

// One table for all threads: those of autograd look into it too.
struct Owners {
  std::shared_mutex mutex;
  std::unordered_map<const c10::StorageImpl*, std::weak_ptr<ParameterOwner>>
      by_storage;
};

Owners& owners() {
  static auto* const all = new Owners;  // outlives threads that compute
  return *all;
}

}  // namespace

std::shared_ptr<ParameterOwner>
parameter_owner_of(const torch::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  auto& all = owners();
  const std::shared_lock lock(all.mutex);
  const auto found =
      all.by_storage.find(tensor.storage().unsafeGetStorageImpl());
  return found == all.by_storage.end() ? nullptr : found->second.lock();
}

void set_parameter_owner(
    const c10::StorageImpl* storage, std::weak_ptr<ParameterOwner> owner) {
  auto& all = owners();
  const std::unique_lock lock(all.mutex);
  all.by_storage[storage] = std::move(owner);
}

void remove_parameter_owner(const c10::StorageImpl* storage) {
  auto& all = owners();
  const std::unique_lock lock(all.mutex);
  all.by_storage.erase(storage);
}

}  // namespace echelon
