#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>

#include "echelon/comm/local/local.h"
#include "echelon/comm/world.h"
#include "echelon/comm/world_impl.h"
#include "echelon/error.h"

namespace echelon {
namespace {

/// The first error of any rank, by time.
class FirstError {
 public:
  void set(int rank, const std::exception_ptr& error) {
    std::lock_guard lock(mutex_);
    if (error_) return;
    rank_ = rank;
    error_ = error;
  }

  void rethrow() const {
    if (!error_) return;
    const std::string place = "rank " + std::to_string(rank_) + ": ";
    const auto with_place = [&](const std::string& text) {
      return text.rfind(place, 0) == 0 ? text : place + text;
    };
    try {
      std::rethrow_exception(error_);
    } catch (const ConfigError& error) {
      throw ConfigError(with_place(error.what()));
    } catch (const CommError& error) {
      throw CommError(with_place(error.what()));
    } catch (const DataError& error) {
      throw DataError(with_place(error.what()));
    } catch (const CheckpointError& error) {
      throw CheckpointError(with_place(error.what()));
    } catch (const NumericError& error) {
      throw NumericError(with_place(error.what()));
    } catch (const std::exception& error) {
      throw Error(with_place(error.what()));
    }
  }

 private:
  std::mutex mutex_;
  int rank_ = 0;
  std::exception_ptr error_;
};

}  // namespace

void run_ranks(
    int num_ranks, const std::function<void(World&)>& body,
    const CommOptions& options) {
  if (num_ranks < 1) {
    throw ConfigError(
        "run_ranks: " + std::to_string(num_ranks) +
        " ranks; at least 1 is needed");
  }
  if (num_ranks == 1) {
    World world = World::alone(options);
    body(world);
    return;
  }
  // LibTorch's flight recorder is one per process and not safe with the gloo
  // groups of several threads (its map is written outside of its lock); the
  // World's history does its work.
  ::setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/1);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto board = std::make_shared<MemoryBoard>(num_ranks);
  const auto hub = local::make_hub(num_ranks);
  FirstError first_error;
  const auto run = [&](int rank) {
    try {
      auto impl = std::make_unique<World::Impl>();
      impl->env.rank = impl->env.local_rank = rank;
      impl->env.world_size = impl->env.local_world_size = num_ranks;
      impl->env.launcher = "threads";
      impl->options = options;
      impl->hub = hub;
      impl->kind = choose_backend(options, impl->env);
      impl->store = store;
      impl->observer = std::make_shared<Observer>(rank, board);
      std::vector<int> all;
      for (int r = 0; r < num_ranks; ++r) all.push_back(r);
      impl->group = impl->make("world", all, impl->kind);
      World world(std::move(impl));
      at::set_num_threads(world.compute_threads());
      try {
        body(world);
      } catch (...) {
        // Before the world ends, which fails the other ranks' collectives.
        first_error.set(rank, std::current_exception());
        throw;
      }
    } catch (...) {
      first_error.set(rank, std::current_exception());
      hub->abort("rank " + std::to_string(rank) + " ended with an error");
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) threads.emplace_back(run, rank);
  for (auto& thread : threads) thread.join();
  first_error.rethrow();
}

}  // namespace echelon
