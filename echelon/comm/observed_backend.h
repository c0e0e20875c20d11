// A backend around a backend: records every collective, reports on every rank
// which ranks did not come, and can compare the ranks' calls.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>

#include "echelon/comm/observer.h"

namespace echelon {

struct ObservedBackendOptions {
  ObservedGroup group;
  /// Compare the calls of all ranks through `store` before each one.
  bool check = false;
  c10::intrusive_ptr<c10d::Store> store;
  std::chrono::milliseconds timeout;
  /// Where the inner backend's calls run: on the CPU, where a call is over when
  /// its wait() returns or its future is complete, or on a device, which works
  /// off what the host has queued.
  c10::Device device = c10::DeviceType::CPU;
  bool queued = false;
};

/// Forwards what Group calls, and nothing else.
c10::intrusive_ptr<c10d::Backend> observe_backend(
    c10::intrusive_ptr<c10d::Backend> inner, std::shared_ptr<Observer> observer,
    ObservedBackendOptions options);

}  // namespace echelon
