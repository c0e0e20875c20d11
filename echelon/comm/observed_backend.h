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
  /// Whether the inner backend completes the futures of its work when the work
  /// is done (NCCL completes them when it is queued).
  bool futures_mean_done = true;
};

/// Forwards what c10d's reducer and Group call, and nothing else.
c10::intrusive_ptr<c10d::Backend> observe_backend(
    c10::intrusive_ptr<c10d::Backend> inner, std::shared_ptr<Observer> observer,
    ObservedBackendOptions options);

}  // namespace echelon
