#include "echelon/memory/activation_storage.h"

#include <torch/types.h>
#include <torch/utils.h>

#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <utility>

#include "echelon/error.h"
#include "echelon/memory/host_copies.h"

namespace echelon {
namespace {

using torch::Tensor;
using IsParameter = std::function<bool(const Tensor&)>;

// A storage that lies elsewhere.
class Elsewhere {
 public:
  virtual ~Elsewhere() = default;
  /// Begins to bring it back.
  virtual void prefetch() {}
  /// It, for the current stream. `last`: nobody asks again soon.
  virtual c10::Storage get(bool last) = 0;
};

class OnHost : public Elsewhere {
 public:
  OnHost(HostCopies& copies, const c10::Storage& storage, c10::Device device)
      : copies_(copies), there_(copies.put(storage, device)) {}

  void prefetch() override {
    if (!back_) back_ = copies_.fetch(*there_);
  }
  c10::Storage get(bool last) override {
    prefetch();
    copies_.wait(*back_);
    c10::Storage storage = back_->storage;
    if (last) back_.reset();
    return storage;
  }

 private:
  HostCopies& copies_;
  std::shared_ptr<HostCopy> there_;
  std::optional<HostCopies::Fetched> back_;
};

Tensor over(const c10::Storage& storage, const torch::TensorOptions& options) {
  const auto itemsize = static_cast<int64_t>(options.dtype().itemsize());
  return at::empty({0}, options)
      .set_(
          storage, 0, {static_cast<int64_t>(storage.nbytes()) / itemsize}, {1});
}

class Rounded : public Elsewhere {
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
  std::unique_ptr<Elsewhere> elsewhere;
  c10::weak_intrusive_ptr<c10::StorageImpl> original;
  uint32_t version = 0;
  torch::Dtype dtype;
  uint64_t number = 0;  // in the order of saving
  int64_t views = 0;
  int64_t asked = 0;  // views that asked in this round
  int64_t round = 0;
};

class StorageHooks : public SavedTensorHooks,
                     public std::enable_shared_from_this<StorageHooks> {
 public:
  StorageHooks(IsParameter is_parameter, int64_t min_bytes)
      : is_parameter_(std::move(is_parameter)), min_bytes_(min_bytes) {}

  std::function<Tensor()> pack(const Tensor& tensor) override {
    if (!takes(tensor)) return nullptr;
    const std::lock_guard lock(mutex_);
    return [view = std::make_shared<View>(
                shared_from_this(), entry_of(tensor), tensor)] {
      return view->get();
    };
  }

 protected:
  virtual bool takes_dtype(torch::Dtype dtype) const = 0;
  virtual std::unique_ptr<Elsewhere> put(const Tensor& tensor) = 0;

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
    int64_t round_ = -1;  // of the entry, when this last asked
  };

  bool takes(const Tensor& tensor) const {
    return tensor.layout() == torch::kStrided && tensor.numel() > 0 &&
           (tensor.is_cpu() || tensor.is_cuda()) &&
           takes_dtype(tensor.scalar_type()) &&
           static_cast<int64_t>(tensor.storage().nbytes()) >= min_bytes_ &&
           !is_parameter_(tensor);
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
        .elsewhere = put(tensor),
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

  // `round`: of the view that asks, when it last did.
  c10::Storage get(Entry& entry, int64_t& round) {
    if (round != entry.round) {
      round = entry.round;
      ++entry.asked;
    }
    const bool last = entry.asked >= entry.views;
    auto storage = entry.elsewhere->get(last);
    if (last) {
      ++entry.round;
      entry.asked = 0;
    }
    prefetch_before(entry.number);
    return storage;
  }

  // Backward comes to what was saved earlier.
  void prefetch_before(uint64_t number) {
    auto next = in_order_.lower_bound(number);
    while (next != in_order_.begin()) {
      --next;
      if (const auto entry = next->second.lock()) {
        entry->elsewhere->prefetch();
        return;
      }
      next = in_order_.erase(next);
    }
  }

  // Forgets entries that are gone, now and then.
  void sweep() {
    if (by_storage_.size() < sweep_at_) return;
    std::erase_if(
        by_storage_, [](const auto& item) { return item.second.expired(); });
    std::erase_if(
        in_order_, [](const auto& item) { return item.second.expired(); });
    sweep_at_ = 64 + 2 * by_storage_.size();
  }

  IsParameter is_parameter_;
  int64_t min_bytes_;
  std::mutex mutex_;
  std::map<const c10::StorageImpl*, std::weak_ptr<Entry>> by_storage_;
  std::map<uint64_t, std::weak_ptr<Entry>> in_order_;
  uint64_t next_number_ = 0;
  size_t sweep_at_ = 64;
};

class Offload : public StorageHooks {
 public:
  using StorageHooks::StorageHooks;

 protected:
  bool takes_dtype(torch::Dtype) const override { return true; }
  std::unique_ptr<Elsewhere> put(const Tensor& tensor) override {
    return std::make_unique<OnHost>(copies_, tensor.storage(), tensor.device());
  }

 private:
  HostCopies copies_;
};

class Bf16 : public StorageHooks {
 public:
  using StorageHooks::StorageHooks;

 protected:
  bool takes_dtype(torch::Dtype dtype) const override {
    return dtype == torch::kFloat32 || dtype == torch::kFloat64;
  }
  std::unique_ptr<Elsewhere> put(const Tensor& tensor) override {
    return std::make_unique<Rounded>(tensor.storage(), tensor.options());
  }
};

}  // namespace

std::shared_ptr<SavedTensorHooks>
offload_to_host(IsParameter is_parameter, int64_t min_bytes) {
  return std::make_shared<Offload>(std::move(is_parameter), min_bytes);
}

std::shared_ptr<SavedTensorHooks>
keep_in_bf16(IsParameter is_parameter, int64_t min_bytes) {
  return std::make_shared<Bf16>(std::move(is_parameter), min_bytes);
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
