// A backend around a backend: records every collective, reports on every rank
// which ranks did not come, and can compare the ranks' calls.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "echelon/comm/trace/record.h"
#include "echelon/comm/trace/status_board.h"

namespace echelon {

/// A group, as the observer knows it.
struct ObservedGroup {
  size_t number = 0;  // counted in the order in which all ranks create groups
  std::string axis;
  std::vector<int> ranks;  // world ranks
};

/// One call, from its begin to its end.
struct ObservedCall {
  uint64_t ticket = 0;
  CollectiveRecord record;
  std::chrono::steady_clock::time_point begun;
  const ObservedGroup* group = nullptr;
  bool collective = true;  // send and recv are not
};

/// One rank's record of its own and the others' collectives; the backends
/// report their calls to it. Thread-safe.
class Observer {
 public:
  Observer(int rank, std::shared_ptr<StatusBoard> board)
      : rank_(rank), board_(std::move(board)) {}

  History& history() { return history_; }

  /// Fills in ticket and begin time.
  void begin(ObservedCall& call);
  void end(const ObservedCall& call, bool failed = false);

  /// The error that a failed call throws: a CommError that names the operation,
  /// axis and label and, when ranks had not arrived, what each of them did
  /// last.
  std::exception_ptr
  explain(const ObservedCall& call, const std::exception_ptr& cause) const;

 private:
  const int rank_;
  std::shared_ptr<StatusBoard> board_;
  History history_;
  std::mutex mutex_;
  RankStatus status_;
};

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

/// Forwards what Group calls, and nothing else.
c10::intrusive_ptr<c10d::Backend> observe_backend(
    c10::intrusive_ptr<c10d::Backend> inner, std::shared_ptr<Observer> observer,
    ObservedBackendOptions options);

}  // namespace echelon
