// Autograd saves views; what is stored elsewhere is their storage, once. An
// Entry is one storage at one version and dtype, and each saved tensor is a
// View of it. The Entry lives as long as its views; the maps hold weak
// pointers.
//
// A round of an Entry is a backward pass: when all its views have asked once,
// the memory that was brought back is released and the next round begins.
// Entries are numbered in the order of saving, so a View that asks also starts
// the copy of the nearest lower number that lives.
//
// Forward and autograd's threads call; one mutex guards entries and copies.
#include "echelon/memory/activation_storage.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/Event.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using torch::Tensor;
using IsParameter = std::function<bool(const Tensor&)>;

// Bytes in host memory: pinned when they came from a GPU.
struct HostCopy {
  Tensor bytes;
  c10::Device device;  // where they came from
};

// Copies that may be in flight before forward waits for the oldest.
constexpr size_t kMostLeaving = 4;

// All elements of `storage` in one dimension.
Tensor over(const c10::Storage& storage, const torch::TensorOptions& options) {
  const auto itemsize = static_cast<int64_t>(options.dtype().itemsize());
  return at::empty({0}, options)
      .set_(
          storage, 0, {static_cast<int64_t>(storage.nbytes()) / itemsize}, {1});
}

torch::TensorOptions bytes_on(c10::Device device) {
  return torch::TensorOptions().dtype(torch::kByte).device(device);
}

Tensor host_bytes(int64_t count, bool pinned) {
  try {
    return at::empty({count}, bytes_on(torch::kCPU).pinned_memory(pinned));
  } catch (const c10::Error& error) {
    throw Error(format(
        "[memory] activations = \"offload\": the host has no memory for {}{} "
        "bytes more; keep fewer activations (memory.recompute), or use fewer "
        "ranks per host",
        count, pinned ? " pinned" : ""));
  }
}

bool has_streams(c10::Device device) {
  return at::accelerator::isAccelerator(device.type());
}

c10::impl::VirtualGuardImpl guard_of(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

// Makes `after` wait for the work that `before` has been given so far.
void order(const c10::Stream& before, const c10::Stream& after) {
  c10::Event event(before.device_type());
  event.record(before);
  event.block(after);
}

// Copies storages to the host and back, in parallel with the computation. Not
// thread-safe. Copies of a GPU run on a stream of their own; "current" is the
// calling thread's stream.
class HostCopies {
 public:
  struct Fetched {
    c10::Storage storage;
    std::shared_ptr<c10::Event> arrived;  // null: the copy is complete
  };

  // The caller may free the storage, and the current stream may write to it:
  // what the stream does next comes after the copy.
  HostCopy put(const c10::Storage& storage, c10::Device device) {
    HostCopy copy{
        host_bytes(static_cast<int64_t>(storage.nbytes()), has_streams(device)),
        device};
    if (!has_streams(device)) {
      copy.bytes.copy_(over(storage, bytes_on(device)));
      return copy;
    }
    const auto current = guard_of(device).getStream(device);
    const auto& side = side_stream(device);
    order(current, side);
    auto left = std::make_shared<c10::Event>(device.type());
    {
      const c10::StreamGuard on_side(side);
      copy.bytes.copy_(over(storage, bytes_on(device)), /*non_blocking=*/true);
      left->record(side);
    }
    leaving_.push_back({storage, current, std::move(left)});
    release_leaving(kMostLeaving);
    return copy;
  }

  // Begins to copy it back to the device that it came from.
  Fetched fetch(const HostCopy& copy) {
    Tensor bytes = at::empty({copy.bytes.numel()}, bytes_on(copy.device));
    if (!has_streams(copy.device)) {
      bytes.copy_(copy.bytes);
      return {bytes.storage(), nullptr};
    }
    release_leaving(0);
    const auto guard = guard_of(copy.device);
    const auto& side = side_stream(copy.device);
    // The new memory may have been another tensor's until now.
    order(guard.getStream(copy.device), side);
    auto arrived = std::make_shared<c10::Event>(copy.device.type());
    {
      const c10::StreamGuard on_side(side);
      bytes.copy_(copy.bytes, /*non_blocking=*/true);
      arrived->record(side);
    }
    guard.recordDataPtrOnStream(bytes.storage().data_ptr(), side);
    return {bytes.storage(), std::move(arrived)};
  }

  // Makes the current stream wait for the copy.
  void wait(const Fetched& fetched) const {
    if (!fetched.arrived) return;
    const auto device = fetched.storage.device();
    fetched.arrived->block(guard_of(device).getStream(device));
  }

 private:
  struct Leaving {
    c10::Storage storage;
    c10::Stream from;
    std::shared_ptr<c10::Event> left;
  };

  // Storages that are being copied are held until their copy is complete: the
  // current stream could overwrite them.
  void release_leaving(size_t at_most) {
    while (!leaving_.empty()) {
      const auto& oldest = leaving_.front();
      if (!oldest.left->query()) {
        if (leaving_.size() <= at_most) return;
        oldest.left->block(oldest.from);
      }
      leaving_.pop_front();
    }
  }

  const c10::Stream& side_stream(c10::Device device) {
    const auto found = side_streams_.find(device.index());
    if (found != side_streams_.end()) return found->second;
    return side_streams_
        .emplace(
            device.index(),
            guard_of(device).getStreamFromGlobalPool(device, /*high=*/false))
        .first->second;
  }

  std::map<c10::DeviceIndex, c10::Stream> side_streams_;
  std::deque<Leaving> leaving_;
};

// A storage that was moved off the device, or that was compressed.
class StoredElsewhere {
 public:
  virtual ~StoredElsewhere() = default;
  // Begins to bring it back.
  virtual void prefetch() {}
  // The storage, for the current stream. `last`: no other view will ask for it
  // in this backward pass.
  virtual c10::Storage get(bool last) = 0;
};

class OnHost : public StoredElsewhere {
 public:
  OnHost(
      std::shared_ptr<HostCopies> copies, const c10::Storage& storage,
      c10::Device device)
      : copies_(std::move(copies)), there_(copies_->put(storage, device)) {}

  void prefetch() override {
    if (!back_) back_ = copies_->fetch(there_);
  }
  c10::Storage get(bool last) override {
    prefetch();
    copies_->wait(*back_);
    c10::Storage storage = back_->storage;
    if (last) back_.reset();
    return storage;
  }

 private:
  std::shared_ptr<HostCopies> copies_;
  HostCopy there_;
  std::optional<HostCopies::Fetched> back_;
};

class Rounded : public StoredElsewhere {
 public:
  Rounded(const c10::Storage& storage, const torch::TensorOptions& options)
      : rounded_(over(storage, options).to(torch::kBFloat16)),
        dtype_(c10::typeMetaToScalarType(options.dtype())) {}

  c10::Storage get(bool last) override {
    if (!back_) back_ = rounded_.to(dtype_).storage();
    c10::Storage storage = back_;
    if (last) back_ = {};
    return storage;
  }

 private:
  Tensor rounded_;
  torch::Dtype dtype_;
  c10::Storage back_;
};

// A storage, and how many saved tensors are views of it.
struct Entry {
  std::unique_ptr<StoredElsewhere> stored;
  c10::weak_intrusive_ptr<c10::StorageImpl> original;
  uint32_t version = 0;
  torch::Dtype dtype;
  uint64_t number = 0;  // in the order of saving
  int64_t views = 0;
  int64_t asked = 0;  // views that asked in this round
  int64_t round = 0;  // a backward pass: a retained graph has several
};

// Stores the storages of tensors for which `takes` is true by `store`.
class StorageHooks : public SavedTensorHooks,
                     public std::enable_shared_from_this<StorageHooks> {
 public:
  using Takes = std::function<bool(const Tensor&)>;
  using Store = std::function<std::unique_ptr<StoredElsewhere>(const Tensor&)>;

  StorageHooks(Takes takes, Store store, int64_t min_bytes)
      : takes_(std::move(takes)),
        store_(std::move(store)),
        min_bytes_(min_bytes) {}

  std::function<Tensor()> pack(const Tensor& tensor) override {
    if (!takes(tensor)) return nullptr;
    const std::lock_guard lock(mutex_);
    return [view = std::make_shared<View>(
                shared_from_this(), entry_of(tensor), tensor)] {
      return view->get();
    };
  }

 private:
  class View {
   public:
    View(
        std::shared_ptr<StorageHooks> hooks, std::shared_ptr<Entry> entry,
        const Tensor& tensor)
        : hooks_(std::move(hooks)),
          entry_(std::move(entry)),
          options_(tensor.options()),
          sizes_(tensor.sizes().vec()),
          strides_(tensor.strides().vec()),
          offset_(tensor.storage_offset()) {
      ++entry_->views;
    }
    ~View() {
      const std::lock_guard lock(hooks_->mutex_);
      --entry_->views;
      if (round_ == entry_->round) --entry_->asked;
      entry_.reset();
    }
    View(const View&) = delete;
    View& operator=(const View&) = delete;

    Tensor get() {
      const torch::NoGradGuard no_grad;
      const std::lock_guard lock(hooks_->mutex_);
      const auto storage = hooks_->get(*entry_, round_);
      return at::empty({0}, options_).set_(storage, offset_, sizes_, strides_);
    }

   private:
    std::shared_ptr<StorageHooks> hooks_;
    std::shared_ptr<Entry> entry_;
    torch::TensorOptions options_;
    std::vector<int64_t> sizes_;
    std::vector<int64_t> strides_;
    int64_t offset_;
    int64_t round_ = -1;  // the entry's round when this view last asked
  };

  bool takes(const Tensor& tensor) const {
    return tensor.layout() == torch::kStrided && tensor.numel() > 0 &&
           (tensor.is_cpu() || has_streams(tensor.device())) &&
           static_cast<int64_t>(tensor.storage().nbytes()) >= min_bytes_ &&
           takes_(tensor);
  }

  std::shared_ptr<Entry> entry_of(const Tensor& tensor) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto& known = by_storage_[storage];
    auto entry = known.lock();
    if (entry && !entry->original.expired() &&
        entry->version == tensor._version() &&
        entry->dtype == tensor.scalar_type()) {
      return entry;
    }
    entry = std::make_shared<Entry>(Entry{
        .stored = store_(tensor),
        .original = c10::weak_intrusive_ptr<c10::StorageImpl>(
            c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage)),
        .version = static_cast<uint32_t>(tensor._version()),
        .dtype = tensor.scalar_type(),
        .number = next_number_++});
    known = entry;
    in_order_[entry->number] = entry;
    sweep();
    return entry;
  }

  // `round` is the round in which the view that asks now asked last.
  c10::Storage get(Entry& entry, int64_t& round) {
    if (round != entry.round) {
      round = entry.round;
      ++entry.asked;
    }
    const bool last = entry.asked >= entry.views;
    auto storage = entry.stored->get(last);
    if (last) {
      ++entry.round;
      entry.asked = 0;
    }
    prefetch_before(entry.number);
    return storage;
  }

  // Backward asks for tensors in the reverse order of saving.
  void prefetch_before(uint64_t number) {
    auto next = in_order_.lower_bound(number);
    while (next != in_order_.begin()) {
      --next;
      if (const auto entry = next->second.lock()) {
        entry->stored->prefetch();
        return;
      }
      next = in_order_.erase(next);
    }
  }

  // Removes expired entries each time that the map has doubled.
  void sweep() {
    if (by_storage_.size() < sweep_at_) return;
    std::erase_if(
        by_storage_, [](const auto& item) { return item.second.expired(); });
    std::erase_if(
        in_order_, [](const auto& item) { return item.second.expired(); });
    sweep_at_ = 64 + 2 * by_storage_.size();
  }

  Takes takes_;
  Store store_;
  int64_t min_bytes_;
  std::mutex mutex_;
  std::map<const c10::StorageImpl*, std::weak_ptr<Entry>> by_storage_;
  std::map<uint64_t, std::weak_ptr<Entry>> in_order_;
  uint64_t next_number_ = 0;
  size_t sweep_at_ = 64;
};

}  // namespace

std::shared_ptr<SavedTensorHooks>
offload_to_host(IsParameter is_parameter, int64_t min_bytes) {
  return std::make_shared<StorageHooks>(
      std::not_fn(std::move(is_parameter)),
      [copies = std::make_shared<HostCopies>()](const Tensor& tensor) {
        return std::make_unique<OnHost>(
            copies, tensor.storage(), tensor.device());
      },
      min_bytes);
}

std::shared_ptr<SavedTensorHooks>
keep_in_bf16(IsParameter is_parameter, int64_t min_bytes) {
  return std::make_shared<StorageHooks>(
      [is_parameter = std::move(is_parameter)](const Tensor& tensor) {
        const auto dtype = tensor.scalar_type();
        return (dtype == torch::kFloat32 || dtype == torch::kFloat64) &&
               !is_parameter(tensor);
      },
      [](const Tensor& tensor) {
        return std::make_unique<Rounded>(tensor.storage(), tensor.options());
      },
      min_bytes);
}

LayerForward
with_hooks(LayerForward forward, std::shared_ptr<SavedTensorHooks> hooks) {
  return [forward = std::move(forward),
          hooks = std::move(hooks)](const std::vector<Tensor>& inputs) {
    const SavedTensorScope scope(hooks);
    return forward(inputs);
  };
}

}  // namespace echelon
