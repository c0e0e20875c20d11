// A collective in progress: a coroutine that stops whenever it must wait for a
// peer, so that one thread can run many of them.
#pragma once

#include <atomic>
#include <coroutine>
#include <cstdint>
#include <exception>
#include <utility>

namespace echelon::local {

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

}  // namespace echelon::local
