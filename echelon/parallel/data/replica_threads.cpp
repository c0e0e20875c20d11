#include "echelon/parallel/data/replica_threads.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace echelon {

struct ReplicaThreads::Impl {
  void serve(World& world);
  bool next_task(uint64_t& seen);
  void fail();

  int num_ranks = 0;
  int64_t threads = 0;
  std::function<void(int)> release;

  std::mutex mutex;
  std::condition_variable changed;
  const std::function<void(World&)>* task = nullptr;
  std::optional<at::ThreadLocalState> state;  // of the caller
  uint64_t number = 0;                        // of the task
  int done = 0;                               // ranks that finished it
  bool stop = false;
  bool ended = false;        // all threads have left
  std::exception_ptr error;  // the first one

  std::thread host;  // runs the ranks
};

// Waits for a task that is newer than `seen`; false when there is none to come.
bool ReplicaThreads::Impl::next_task(uint64_t& seen) {
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return stop || number != seen; });
  seen = number;
  return !stop;
}

void ReplicaThreads::Impl::serve(World& world) {
  if (threads > 0) at::set_num_threads(static_cast<int>(threads));
  uint64_t seen = 0;
  while (next_task(seen)) {
    try {
      const at::ThreadLocalStateGuard guard(*state);
      (*task)(world);
    } catch (...) {
      fail();
      release(world.rank());
      throw;
    }
    std::lock_guard lock(mutex);
    ++done;
    changed.notify_all();
  }
}

// Before anything is released: the others' errors are consequences of this one.
// Those that wait for a task must leave too.
void ReplicaThreads::Impl::fail() {
  std::lock_guard lock(mutex);
  if (!error) error = std::current_exception();
  stop = true;
  changed.notify_all();
}

ReplicaThreads::ReplicaThreads(
    int num_ranks, int64_t threads, const CommOptions& options,
    std::function<void(int)> release)
    : impl_(std::make_unique<Impl>()) {
  impl_->release = std::move(release);
  impl_->num_ranks = num_ranks;
  impl_->threads = threads;
  impl_->host = std::thread([impl = impl_.get(), num_ranks, options] {
    try {
      run_ranks(
          num_ranks, [impl](World& world) { impl->serve(world); }, options);
    } catch (...) {
      impl->fail();
    }
    std::lock_guard lock(impl->mutex);
    impl->ended = true;
    impl->changed.notify_all();
  });
}

ReplicaThreads::~ReplicaThreads() {
  {
    std::lock_guard lock(impl_->mutex);
    impl_->stop = true;
    impl_->changed.notify_all();
  }
  impl_->host.join();
}

void ReplicaThreads::run(const std::function<void(World&)>& body) {
  std::unique_lock lock(impl_->mutex);
  impl_->task = &body;
  impl_->state.emplace();
  impl_->done = 0;
  ++impl_->number;
  impl_->changed.notify_all();
  // After an error the task lives until every thread has left it.
  impl_->changed.wait(lock, [&] {
    return impl_->ended || (!impl_->stop && impl_->done == impl_->num_ranks);
  });
  impl_->task = nullptr;
  if (impl_->error) std::rethrow_exception(impl_->error);
}

}  // namespace echelon
