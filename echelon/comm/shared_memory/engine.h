// Runs the operations of one rank: on the thread that issues them, on the
// threads that wait for them, and otherwise on the rank's progress thread,
// which never blocks in one group while another could progress.
#pragma once

#include <atomic>
#include <chrono>
#include <coroutine>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "echelon/comm/shared_memory/segment.h"

namespace echelon::local {

class Engine;
class Lane;
class Operation;

/// The condition that a stopped task waits for; any thread may test it.
struct Readiness {
  bool (*test)(const void* object, uint64_t value) = nullptr;
  const void* object = nullptr;
  uint64_t value = 0;

  bool met() const { return test == nullptr || test(object, value); }

  /// word >= value, both counting up.
  static Readiness reaches(const std::atomic<uint64_t>& word, uint64_t value) {
    return {
        [](const void* object, uint64_t value) {
          const auto* word = static_cast<const std::atomic<uint64_t>*>(object);
          return static_cast<int64_t>(
                     word->load(std::memory_order_acquire) - value) >= 0;
        },
        &word, value};
  }
};

/// A collective in progress: a coroutine that stops whenever it must wait for a
/// peer, so that one thread can run many of them.
class Task {
 public:
  struct promise_type {
    Readiness waits_for;
    std::exception_ptr error;

    Task get_return_object() {
      return Task(std::coroutine_handle<promise_type>::from_promise(*this));
    }
    std::suspend_always initial_suspend() noexcept { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { error = std::current_exception(); }
  };

  Task() = default;
  explicit Task(std::coroutine_handle<promise_type> handle) : handle_(handle) {}
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, {})) {}
  Task& operator=(Task&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Task() { reset(); }

  bool ready() const { return handle_.promise().waits_for.met(); }
  bool done() const { return handle_.done(); }
  void resume() { handle_.resume(); }
  std::exception_ptr error() const { return handle_.promise().error; }
  void reset() {
    if (handle_) {
      std::exchange(handle_, {}).destroy();
    }
  }

 private:
  std::coroutine_handle<promise_type> handle_;
};

/// co_await Until{…} continues at once when the condition is met, unless
/// `pause` asks to stop anyway: the thread that issued a big operation then
/// returns.
struct Until {
  Readiness readiness;
  bool pause = false;

  bool await_ready() const { return !pause && readiness.met(); }
  void await_suspend(std::coroutine_handle<Task::promise_type> task) const {
    task.promise().waits_for = readiness;
  }
  void await_resume() const {}
};

/// The group of an operation, as far as the engine needs it.
class Supervisor {
 public:
  virtual ~Supervisor() = default;
  /// True when no operation of this group may continue. Cheap.
  virtual bool failed() const = 0;
  /// The error to give to `operation` once failed().
  virtual std::exception_ptr failure(const Operation& operation) = 0;
  /// The error when `operation` can never complete because a peer that it needs
  /// has left; null while it still can. Asked only while it waits.
  virtual std::exception_ptr peer_left(const Operation& operation) = 0;
  /// The deadline passed: tells the group, returns the error.
  virtual std::exception_ptr expire(const Operation& operation) = 0;
  /// Returns when no peer accesses this rank's memory any more.
  virtual void quiesce() = 0;
};

/// One collective or message. Thread-safe once issued.
class Operation : public std::enable_shared_from_this<Operation> {
 public:
  using Clock = std::chrono::steady_clock;

  bool done() const { return done_.load(std::memory_order_acquire) != 0; }
  /// After done(): null when it succeeded.
  std::exception_ptr error() const { return error_; }
  /// Waits, and runs the operation meanwhile. Zero: no limit but the
  /// operation's own deadline. False: the limit passed; the operation
  /// continues. Must not be called on the progress thread, unless done().
  bool wait(std::chrono::milliseconds limit = {});

  uint64_t sequence = 0;
  const char* name = "";  // "all_reduce"
  int peer = -1;          // of a message; -1: a collective
  bool outgoing = false;  // a send
  uint64_t phase = 0;     // the group's phase that a collective waits in
  std::chrono::milliseconds timeout{0};  // zero: none
  Task task;
  std::shared_ptr<Supervisor> group;
  /// Called once, before done() turns true, on the thread that finished it.
  std::function<void(Operation&)> on_done;

 private:
  friend class Engine;
  std::atomic<uint32_t> done_{0};
  std::exception_ptr error_;
  bool started_ = false;
  Clock::time_point issued_;
  Engine* engine_ = nullptr;
  std::shared_ptr<Lane> lane_;
};

using OperationPtr = std::shared_ptr<Operation>;

/// Operations that run one after another: a group's collectives, the sends to
/// one peer, one receive.
class Lane {
 private:
  friend class Engine;
  std::mutex mutex_;
  std::deque<OperationPtr> queue_;
  bool busy_ = false;    // some thread runs the front
  bool listed_ = false;  // the progress thread knows it
  int helpers_ = 0;      // waiting threads that run it
};

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  Engine(std::shared_ptr<Segment> segment, int rank);
  ~Engine();

  /// Starts the progress thread, which keeps the engine alive.
  void start();
  /// Ends it. From the progress thread itself: returns, and it ends by itself.
  void stop();

  /// Puts the operation behind the others of its lane.
  void
  enqueue(const std::shared_ptr<Lane>& lane, const OperationPtr& operation);
  /// Runs the operation until it must wait; unless `async`, returns when it is
  /// done.
  void begin(const OperationPtr& operation, bool async);
  bool wait(const OperationPtr& operation, std::chrono::milliseconds limit);

  /// Tells rank `r` that something it may wait for has changed.
  void ring(int r);
  /// Tells this rank's own threads.
  void ring_self();

  /// True on a progress thread, where waiting would be a deadlock.
  static bool on_progress_thread();

 private:
  void run();
  bool step(Lane& lane, bool look_at_clock, const Operation* until = nullptr);
  std::exception_ptr obstacle(const Operation& operation, bool look_at_clock);
  bool resume(Operation& operation, std::exception_ptr& error);
  bool actionable(Lane& lane);
  static bool has_helper(Lane& lane);
  bool expecting(std::vector<std::shared_ptr<Lane>>& lanes);
  void finish(const OperationPtr& operation);
  void list(const std::shared_ptr<Lane>& lane);
  void wake_engine();
  void wake_waiters();

  std::shared_ptr<Segment> segment_;
  int rank_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<Lane>> lanes_;  // listed
  std::atomic<uint64_t> version_{0};          // of lanes_
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace echelon::local
