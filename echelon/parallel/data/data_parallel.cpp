// ReplicaThreads: one thread per rank lives as long as the object and waits for
// tasks, which are numbered. run() publishes a task and its caller's
// thread-local state, and returns when all ranks have done it. After an error
// no rank takes another task; run() then waits until all threads have left,
// since they refer to the task.
#include "echelon/parallel/data/data_parallel.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <torch/nn/module.h>
#include <torch/types.h>

#include <cmath>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {

// ----------------------------------------------------------- replica threads

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
  int done = 0;                               // ranks that finished the task
  bool stop = false;
  bool ended = false;        // all threads have left
  std::exception_ptr error;  // the first one

  std::thread host;  // runs the ranks
};

// Waits for a task newer than `seen`; false when the threads are to end.
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

// Records the first error, before anything is released: later errors are its
// consequences. Threads that wait for a task end too.
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
  // After an error, every thread must have left the task before it is
  // destroyed.
  impl_->changed.wait(lock, [&] {
    return impl_->ended || (!impl_->stop && impl_->done == impl_->num_ranks);
  });
  impl_->task = nullptr;
  if (impl_->error) std::rethrow_exception(impl_->error);
}

// ------------------------------------------------------------------- options

std::vector<int64_t>
split_by_shares(int64_t total, const std::vector<double>& shares) {
  const double sum = std::accumulate(shares.begin(), shares.end(), 0.0);
  std::vector<int64_t> sizes;
  double reached = 0;
  int64_t begin = 0;
  for (const double share : shares) {
    reached += share;
    const int64_t end =
        std::llround(static_cast<double>(total) * (reached / sum));
    sizes.push_back(end - begin);
    begin = end;
  }
  return sizes;
}

namespace detail {

void check_options(const DataParallelOptions& options) {
  if (options.devices.empty()) {
    throw ConfigError("[data parallel] devices is empty; name at least one");
  }
  std::set<std::string> seen;
  for (const auto& device : options.devices) {
    if (device.is_cpu()) continue;
    if (!device.has_index() || !seen.insert(device.str()).second) {
      throw ConfigError(format(
          "[data parallel] device {} comes twice or has no number; one replica "
          "per GPU, as cuda:0, cuda:1 (several replicas on the CPU are fine)",
          device.str()));
    }
  }
  double sum = 0;
  for (const double share : options.shares) {
    if (!(share >= 0) || !std::isfinite(share)) {
      throw ConfigError(
          format("[data parallel] share {:f}; shares are numbers >= 0", share));
    }
    sum += share;
  }
  const bool given = !options.shares.empty();
  if (given && (options.shares.size() != options.devices.size() || sum <= 0)) {
    throw ConfigError(format(
        "[data parallel] {} shares that sum to {:f} for {} devices; one share "
        "per device, not all of them 0",
        options.shares.size(), sum, options.devices.size()));
  }
  if (options.threads < 0) {
    throw ConfigError(format(
        "[data parallel] threads={}; 0 shares the cores, or give a number",
        options.threads));
  }
}

std::shared_ptr<torch::nn::Module>
clone_to(const torch::nn::Module& module, torch::Device device) {
  try {
    return module.clone(device);
  } catch (const c10::Error& error) {
    throw ConfigError(format(
        "[data parallel] {} cannot be copied to the replicas ({}); derive it "
        "from torch::nn::Cloneable, or give a function that builds one",
        module.name(), error.what_without_backtrace()));
  }
}

}  // namespace detail
}  // namespace echelon
