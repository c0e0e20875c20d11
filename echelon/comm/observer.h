// One rank's view of its own collectives and of the other ranks': what runs,
// since when, and what the others did last. Calls that only the device can end
// are asked, twice a second, whether they have.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
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

/// The calls that one work stands for: one, or those of a batch. They end once,
/// for whoever sees the end first.
struct ObservedCalls {
  explicit ObservedCalls(std::vector<ObservedCall> calls);

  std::vector<ObservedCall> calls;
  const ObservedGroup group;  // the backend may be gone when the calls end
  std::atomic<bool> ended{false};
  std::mutex mutex;  // guards what follows
  std::exception_ptr error;
  /// What the observer asks whether the calls are over; it holds no tensors.
  c10::intrusive_ptr<c10d::Work> asked;
};

/// One rank's record of its own and the others' collectives; the backends
/// report their calls to it. Thread-safe.
class Observer {
 public:
  Observer(int rank, std::shared_ptr<StatusBoard> board)
      : rank_(rank), board_(std::move(board)) {}
  ~Observer();

  History& history() { return history_; }

  /// Fills in ticket and begin time.
  void begin(ObservedCall& call);
  void end(ObservedCalls& calls, bool failed = false);
  /// Ends the calls with `cause`; returns the error that they throw from now
  /// on. It names the operation, axis and label: a DeviceError when this rank's
  /// device failed, else a CommError that says, when ranks had not arrived,
  /// what each of them did last.
  std::exception_ptr
  fail(ObservedCalls& calls, const std::exception_ptr& cause);

  /// What happens when watched calls fail, or are not over in time.
  using Lost = std::function<void(const std::exception_ptr& error)>;
  void on_lost(Lost lost);
  /// Ends `calls` when their `asked` is complete. The device alone knows when:
  /// a wait() returns at once. After `timeout` the calls fail, and the listener
  /// of on_lost() is told.
  void watch(
      std::shared_ptr<ObservedCalls> calls, std::chrono::milliseconds timeout);
  /// Asks the watched calls, oldest first: all of them, as the observer's
  /// thread does, or up to the first that is not complete.
  void poll(bool all = false);
  /// The error that ended a watched call; null when there is none.
  std::exception_ptr lost() const;
  /// No call is watched any more.
  void stop_watching();

 private:
  struct Watched {
    std::shared_ptr<ObservedCalls> calls;
    std::chrono::steady_clock::time_point deadline;
  };

  std::exception_ptr
  explain(const ObservedCall& call, const std::exception_ptr& cause) const;
  void lose(Watched& watched, const std::exception_ptr& cause);
  void run();

  const int rank_;
  std::shared_ptr<StatusBoard> board_;
  History history_;
  std::mutex mutex_;
  RankStatus status_;

  mutable std::mutex watch_mutex_;
  std::condition_variable wake_;
  std::list<Watched> watched_;
  std::exception_ptr lost_;
  Lost on_lost_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace echelon
