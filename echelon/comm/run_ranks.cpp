#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <mutex>
#include <thread>

#include "echelon/comm/gloo/gloo_backend.h"
#include "echelon/comm/nccl/nccl_backend.h"
#include "echelon/comm/world_impl.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

/// Rethrows the error of a rank with the rank in front.
[[noreturn]] void rethrow_with_rank(const std::exception_ptr& cause, int rank) {
  const std::string place = format("rank {}: ", rank);
  const auto with_place = [&](const std::string& text) {
    return text.starts_with(place) ? text : place + text;
  };
  try {
    std::rethrow_exception(cause);
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

}  // namespace

void run_ranks(
    int num_ranks, const std::function<void(World&)>& body,
    const CommOptions& options) {
  detail::run_ranks(
      num_ranks, body, options, c10::make_intrusive<c10d::HashStore>());
}

// The ranks are threads with one store, one board and one hub. The first error
// is kept; a World that ends with it fails the others' collectives, so all
// threads end.
void detail::run_ranks(
    int num_ranks, const std::function<void(World&)>& body,
    const CommOptions& options, const c10::intrusive_ptr<c10d::Store>& store) {
  if (num_ranks < 1) {
    throw ConfigError(
        format("run_ranks: {} ranks; at least 1 is needed", num_ranks));
  }
  if (num_ranks == 1) {
    World world = World::alone(options);
    body(world);
    return;
  }
  avoid_flight_recorder();
  keep_nccl_on_this_host();
  const auto board = std::make_shared<MemoryBoard>(num_ranks);
  const auto hub = local::make_hub(num_ranks);
  std::vector<std::shared_ptr<Communicators>> communicators;
  for (int rank = 0; rank < num_ranks; ++rank) {
    communicators.push_back(std::make_shared<Communicators>());
  }
  // Each takes a GPU of its own, where the options ask for them.
  std::vector<RankGpus> gpus;
  const bool ask = options.device == DeviceKind::cuda ||
                   options.backend == BackendKind::nccl;
  for (int rank = 0; rank < num_ranks && ask; ++rank) {
    gpus.push_back(gpus_of_process(rank, 0, rank));
  }
  std::once_flag failed;
  std::exception_ptr first_error;
  int failed_rank = 0;
  const auto fail = [&](int rank) {
    std::call_once(failed, [&] {
      first_error = std::current_exception();
      failed_rank = rank;
      store->set(World::Impl::kFailed, "1");
    });
    for (const auto& one : communicators) one->abort();
  };
  const auto run = [&](int rank) {
    try {
      auto impl = std::make_unique<World::Impl>();
      impl->env.rank = impl->env.local_rank = rank;
      impl->env.world_size = impl->env.local_world_size = num_ranks;
      impl->env.launcher = Launcher::threads;
      impl->options = options;
      impl->hub = hub;
      impl->communicators = communicators[static_cast<size_t>(rank)];
      impl->choose(gpus);
      impl->use_accelerator();
      impl->store = store;
      impl->observer = std::make_shared<Observer>(rank, board);
      impl->watch_device();
      impl->group =
          impl->make("world", World::Impl::all_ranks(num_ranks), impl->kind);
      World world(std::move(impl));
      at::set_num_threads(world.compute_threads());
      try {
        body(world);
      } catch (...) {
        // The error is recorded before the world ends, because its end fails
        // the other ranks' collectives.
        fail(rank);
        throw;
      }
    } catch (...) {
      fail(rank);
      hub->abort(format("rank {} ended with an error", rank));
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) threads.emplace_back(run, rank);
  for (auto& thread : threads) thread.join();
  if (first_error) rethrow_with_rank(first_error, failed_rank);
}

}  // namespace echelon
