// Each call runs on a thread of the store. A call that is not answered in time
// is left alone with that thread, which keeps what it needs, and no other call
// begins.
#include "echelon/comm/store/bounded_store.h"

#include <atomic>
#include <condition_variable>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using std::chrono::milliseconds;
using Bytes = std::vector<uint8_t>;
using Keys = std::vector<std::string>;

// The thread may need this after the store is gone.
struct Calls {
  std::mutex mutex;
  std::condition_variable changed;
  std::function<void()> next;
  bool stop = false;
};

void run_calls(const std::shared_ptr<Calls>& calls) {
  std::unique_lock lock(calls->mutex);
  for (;;) {
    calls->changed.wait(lock, [&] { return calls->stop || calls->next; });
    if (!calls->next) return;
    const auto call = std::exchange(calls->next, nullptr);
    lock.unlock();
    call();
    lock.lock();
  }
}

class BoundedStore : public c10d::Store {
 public:
  BoundedStore(
      c10::intrusive_ptr<c10d::Store> store, milliseconds limit,
      std::string place)
      : Store(store->getTimeout()),
        store_(std::move(store)),
        limit_(limit),
        place_(std::move(place)),
        calls_(std::make_shared<Calls>()),
        thread_([calls = calls_] { run_calls(calls); }) {}
  BoundedStore(const BoundedStore&) = delete;
  BoundedStore& operator=(const BoundedStore&) = delete;

  ~BoundedStore() override {
    if (lost_) {
      thread_.detach();
      return;
    }
    {
      const std::lock_guard lock(calls_->mutex);
      calls_->stop = true;
    }
    calls_->changed.notify_all();
    thread_.join();
  }

  c10::intrusive_ptr<Store> clone() override {
    return bounded_store(
        answer(limit_, [](Store& store) { return store.clone(); }), limit_,
        place_);
  }
  void set(const std::string& key, const Bytes& value) override {
    answer(limit_, [key, value](Store& store) { store.set(key, value); });
  }
  Bytes compareSet(
      const std::string& key, const Bytes& current,
      const Bytes& value) override {
    return answer(limit_, [key, current, value](Store& store) {
      return store.compareSet(key, current, value);
    });
  }
  Bytes get(const std::string& key) override {
    return answer(
        limit_ + timeout_, [key](Store& store) { return store.get(key); });
  }
  int64_t add(const std::string& key, int64_t value) override {
    return answer(
        limit_, [key, value](Store& store) { return store.add(key, value); });
  }
  bool deleteKey(const std::string& key) override {
    return answer(limit_, [key](Store& store) { return store.deleteKey(key); });
  }
  bool check(const Keys& keys) override {
    return answer(limit_, [keys](Store& store) { return store.check(keys); });
  }
  int64_t getNumKeys() override {
    return answer(limit_, [](Store& store) { return store.getNumKeys(); });
  }
  void wait(const Keys& keys) override { wait(keys, timeout_); }
  void wait(const Keys& keys, const milliseconds& timeout) override {
    answer(limit_ + timeout, [keys, timeout](Store& store) {
      store.wait(keys, timeout);
    });
  }
  void setTimeout(const milliseconds& timeout) override {
    Store::setTimeout(timeout);
    answer(limit_, [timeout](Store& store) { store.setTimeout(timeout); });
  }
  void append(const std::string& key, const Bytes& value) override {
    answer(limit_, [key, value](Store& store) { store.append(key, value); });
  }
  std::vector<Bytes> multiGet(const Keys& keys) override {
    return answer(limit_ + timeout_, [keys](Store& store) {
      return store.multiGet(keys);
    });
  }
  void multiSet(const Keys& keys, const std::vector<Bytes>& values) override {
    answer(
        limit_, [keys, values](Store& store) { store.multiSet(keys, values); });
  }
  bool hasExtendedApi() const override { return store_->hasExtendedApi(); }

 private:
  template <typename Call>
  std::invoke_result_t<Call, Store&> answer(milliseconds limit, Call call) {
    // It waits in parts, so that a process that Ctrl-Z stops loses one part.
    constexpr int kParts = 20;
    const std::lock_guard one_call(one_call_);
    if (lost_) fail();
    using Result = std::invoke_result_t<Call, Store&>;
    auto task = std::make_shared<std::packaged_task<Result()>>(
        [store = store_, call = std::move(call)] { return call(*store); });
    auto result = task->get_future();
    {
      const std::lock_guard lock(calls_->mutex);
      calls_->next = [task = std::move(task)] { (*task)(); };
    }
    calls_->changed.notify_all();
    for (int i = 0; i < kParts; ++i) {
      if (result.wait_for(limit / kParts) == std::future_status::ready) {
        return result.get();
      }
    }
    lost_ = true;
    fail();
  }

  [[noreturn]] void fail() const {
    throw CommError(format(
        "the store at {} has not answered within {:g} s: its process hangs, or "
        "its host is cut off",
        place_, std::chrono::duration<double>(limit_).count()));
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const milliseconds limit_;
  const std::string place_;
  std::mutex one_call_;
  std::atomic<bool> lost_{false};
  const std::shared_ptr<Calls> calls_;
  std::thread thread_;
};

}  // namespace

c10::intrusive_ptr<c10d::Store> bounded_store(
    c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds limit,
    std::string place) {
  return c10::make_intrusive<BoundedStore>(
      std::move(store), limit, std::move(place));
}

}  // namespace echelon
