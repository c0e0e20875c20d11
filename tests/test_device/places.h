// Where the tests of the test device run.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/types.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "echelon/comm/nccl/nccl_plugin.h"
#include "tests/test_device/device.h"

extern "C" const echelon::nccl::Plugin* echelon_nccl_plugin();

namespace echelon::test_device {

inline torch::Device device(int index = 0) {
  return {torch::kPrivateUse1, static_cast<c10::DeviceIndex>(index)};
}

inline c10::impl::VirtualGuardImpl guard() {
  return c10::impl::VirtualGuardImpl(torch::kPrivateUse1);
}
inline c10::Stream current(int index = 0) {
  return guard().getStream(device(index));
}
inline c10::Stream new_stream(int index = 0) {
  return guard().getNewStream(device(index));
}

/// `after` waits for what `before` has queued.
inline void order(const c10::Stream& before, const c10::Stream& after) {
  c10::Event event(torch::kPrivateUse1);
  event.record(before);
  event.block(after);
}

/// The groups of one rank.
class Groups {
 public:
  Groups(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
      : store_(std::move(store)), rank_(rank), size_(size) {}

  /// A group of all ranks. They call in the same order.
  c10d::Backend& make(
      const std::string& name,
      std::chrono::milliseconds timeout = std::chrono::seconds(30)) {
    groups_.push_back(echelon_nccl_plugin()->make_backend(
        c10::make_intrusive<c10d::PrefixStore>(name, store_), rank_, size_,
        timeout, rank_, /*most_blocks=*/0));
    return *groups_.back();
  }
  c10d::Store& store() { return *store_; }

  /// Returns when the device has done its work and all ranks are here: a group
  /// that is gone breaks the connections of the others.
  void finish() {
    drain(rank_);
    store_->add("finished", 1);
    while (store_->add("finished", 0) < size_) std::this_thread::yield();
  }

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const int size_;
  std::vector<c10::intrusive_ptr<c10d::Backend>> groups_;
};

/// Runs `body` on `size` threads, each with the device of its rank. Rethrows
/// the first rank's error.
inline void
on_ranks(int size, const std::function<void(int rank, Groups& groups)>& body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::exception_ptr> errors(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      Groups groups(store, rank, size);
      try {
        echelon_nccl_plugin()->set_device(rank);
        body(rank, groups);
      } catch (...) {
        errors[static_cast<size_t>(rank)] = std::current_exception();
      }
      groups.finish();
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace echelon::test_device
