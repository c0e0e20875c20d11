#include "tests/comm/nccl/fake_accelerator.h"

#include <torch/types.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <set>
#include <utility>

#include "echelon/comm/gloo/gloo_backend.h"
#include "echelon/comm/nccl/nccl_plugin.h"

namespace echelon::fake_accelerator {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

Control& control() {
  static Control one;
  return one;
}

thread_local int current_device = -1;

/// A call that is complete for the device when its parts are, unless the device
/// holds all calls. For the host wait() returns at once; only what stands for
/// the stream's order waits for the parts.
class DeviceWork : public c10d::Work {
 public:
  DeviceWork(int rank, std::vector<WorkPtr> parts)
      : Work(rank), parts_(std::move(parts)) {}
  bool isCompleted() override { return !control().hold && over_; }
  bool wait(std::chrono::milliseconds) override {
    for (auto& part : std::exchange(parts_, {})) part->wait();
    over_ = true;
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    TORCH_CHECK(false, "the fake has no futures");
  }

 private:
  std::vector<WorkPtr> parts_;
  std::atomic<bool> over_{false};
};

class Communicator : public c10d::Backend {
 public:
  Communicator(
      c10::intrusive_ptr<c10d::Backend> inner,
      c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds timeout,
      int device)
      : Backend(inner->getRank(), inner->getSize()),
        inner_(std::move(inner)),
        store_(std::move(store)),
        timeout_(timeout),
        device_(device) {
    for (const auto& one : control().notes(device)) {
      if (one.ends_with(" made")) ++number_;
    }
    note("made");
  }

  const std::string getBackendName() const override { return "nccl"; }

  WorkPtr
  allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return call("all_reduce", options.asyncOp, [&] {
      auto inner = options;
      inner.asyncOp = true;
      return inner_->allreduce(tensors, inner);
    });
  }
  WorkPtr _allgather_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::AllgatherOptions& options) override {
    return call("all_gather", options.asyncOp, [&] {
      auto inner = options;
      inner.asyncOp = true;
      auto to = output.view({-1});
      auto from = input.view({-1});
      return inner_->_allgather_base(to, from, inner);
    });
  }
  WorkPtr
  broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return call("broadcast", options.asyncOp, [&] {
      auto inner = options;
      inner.asyncOp = true;
      return inner_->broadcast(tensors, inner);
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return call("barrier", options.asyncOp, [&] {
      c10d::BarrierOptions inner;
      inner.asyncOp = true;
      return inner_->barrier(inner);
    });
  }

  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    return message("send", peer, tag, [this, tensors, peer, tag]() mutable {
      return inner_->send(tensors, peer, tag);
    });
  }
  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    return message("recv", peer, tag, [this, tensors, peer, tag]() mutable {
      return inner_->recv(tensors, peer, tag);
    });
  }

  void startCoalescing() override {
    note("start");
    coalescing_ = true;
  }
  WorkPtr endCoalescing() override {
    note("end");
    coalescing_ = false;
    if (batch_.empty()) return nullptr;
    std::vector<WorkPtr> works;
    for (auto& one : std::exchange(batch_, {})) works.push_back(one());
    return c10::make_intrusive<DeviceWork>(rank_, std::move(works));
  }

  void shutdown() override { end("shutdown"); }
  void abort() override { end("abort"); }

 private:
  void note(const std::string& what) {
    control().note(device_, std::to_string(number_) + " " + what);
  }
  void end(const char* how) {
    note(how);
    ended_ = true;
  }

  WorkPtr
  call(const char* name, bool async, const std::function<WorkPtr()>& make) {
    TORCH_CHECK(!ended_, "the communicator has ended");
    TORCH_CHECK(
        current_device == device_, "the thread's device is ", current_device);
    note(name);
    if (async) {
      return c10::make_intrusive<DeviceWork>(
          rank_, std::vector<WorkPtr>{make()});
    }
    make()->wait();
    return nullptr;
  }

  // A pair's first message, outside of a batch, connects the two: it blocks
  // until both are there.
  WorkPtr
  message(const char* name, int peer, int tag, std::function<WorkPtr()> make) {
    TORCH_CHECK(!ended_, "the communicator has ended");
    note(std::string(name) + " " + std::to_string(peer));
    if (coalescing_) {
      TORCH_CHECK(tag != kBrokenTag, "the message is broken");
      batch_.push_back(std::move(make));
      return nullptr;
    }
    if (connected_.insert(peer).second) {
      const auto key = [&](int from, int to) {
        return "pair/" + std::to_string(from) + "/" + std::to_string(to);
      };
      store_->set(key(rank_, peer), "1");
      store_->wait({key(peer, rank_)}, timeout_);
      note("connected " + std::to_string(peer));
    }
    return c10::make_intrusive<DeviceWork>(rank_, std::vector<WorkPtr>{make()});
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
  c10::intrusive_ptr<c10d::Store> store_;
  const std::chrono::milliseconds timeout_;
  const int device_;
  int number_ = 0;
  bool coalescing_ = false;
  bool ended_ = false;
  std::vector<std::function<WorkPtr()>> batch_;
  std::set<int> connected_;
};

int device_count() {
  return control().num_devices;
}
void set_device(int device_index) {
  current_device = device_index;
  control().note(device_index, "set_device");
}
void synchronize_current_stream() {
  control().note(current_device, "synchronize");
}
c10::intrusive_ptr<c10d::Backend> make_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout, int device_index) {
  auto inner = c10::make_intrusive<c10d::PrefixStore>("gloo", store);
  return c10::make_intrusive<Communicator>(
      make_gloo_backend(inner, rank, size, "127.0.0.1", timeout), store,
      timeout, device_index);
}

constexpr nccl::Plugin kPlugin{
    nccl::Plugin::kVersion,     c10::DeviceType::CPU, device_count, set_device,
    synchronize_current_stream, make_backend};

}  // namespace
}  // namespace echelon::fake_accelerator

extern "C" __attribute__((visibility("default"))) const echelon::nccl::Plugin*
echelon_nccl_plugin() {
  return &echelon::fake_accelerator::kPlugin;
}
extern "C" __attribute__((visibility("default")))
echelon::fake_accelerator::Control*
echelon_fake_accelerator() {
  return &echelon::fake_accelerator::control();
}
