// Joining, in order: read the launcher's variables; connect to the store; wait
// for all ranks, so that one that is missing is named; find this host's
// address; for the local backend, join the ranks of the host; make the status
// board, the observer and the world's group. At the end rank 0, which serves
// the store, waits until the others have left.
//
// Every group is a backend inside an ObservedBackend. Groups are numbered in
// the order of their creation, which is the same on all ranks, so the numbers
// serve as names in the store and on the status board.
#include "echelon/comm/world.h"

#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>

#include "echelon/cluster/host.h"
#include "echelon/comm/gloo/gloo_backend.h"
#include "echelon/comm/group_impl.h"
#include "echelon/comm/local/local.h"
#include "echelon/comm/nccl/nccl_backend.h"
#include "echelon/comm/observed_backend.h"
#include "echelon/comm/store/store.h"
#include "echelon/comm/trace/status_board.h"
#include "echelon/environment/rank_environment.h"
#include "echelon/error.h"
#include "echelon/error_report.h"
#include "echelon/text/format.h"

namespace echelon {

struct World::Impl {
  RankEnvironment env;
  CommOptions options;
  BackendKind kind = BackendKind::local;
  torch::Device device = torch::kCPU;
  std::string address = "127.0.0.1";      // this host, as peers see it
  c10::intrusive_ptr<c10d::Store> store;  // null for one rank
  std::shared_ptr<local::Host> host;      // ranks of one host
  std::shared_ptr<local::Hub> hub;        // ranks that are threads
  std::shared_ptr<Observer> observer;
  size_t num_groups = 0;
  size_t num_exchanges = 0;
  std::optional<Group> group;

  /// With the nccl backend: makes the accelerator's device with this rank's
  /// local rank its device, and the calling thread's.
  void use_accelerator();
  /// Joins the ranks of this host; all of them call.
  void join_host();
  /// A group of `ranks`; every rank of the world calls.
  Group make(
      const std::string& axis, const std::vector<int>& ranks,
      BackendKind backend);
};

namespace {

/// With shared tensors each rank passes its memory file to the others; with
/// more ranks than this, tensors are staged instead.
constexpr int kMaxShared = 128;

/// The status board in the shared memory of a host.
class HostBoard : public StatusBoard {
 public:
  explicit HostBoard(std::shared_ptr<local::Host> host)
      : host_(std::move(host)) {}
  void publish(int, const RankStatus& status) override {
    host_->publish_status(to_bytes(status));
  }
  std::optional<RankStatus> read(int rank) override {
    return status_from_bytes(host_->read_status(rank));
  }

 private:
  std::shared_ptr<local::Host> host_;
};

std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

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

void check_one_host(BackendKind backend, const RankEnvironment& env) {
  if (backend == BackendKind::local && env.local_world_size < env.world_size) {
    throw ConfigError(format(
        "[comm] backend = \"local\": the ranks are on several hosts ({} of {} "
        "here); use \"gloo\" or \"nccl\", or leave it automatic",
        env.local_world_size, env.world_size));
  }
}

/// Whether the ranks compute on accelerators, by `options` and the machine. By
/// themselves, ranks that are threads never do.
bool on_accelerators(const CommOptions& options, const RankEnvironment& env) {
  const BackendKind backend = options.backend;
  const bool nccl = backend == BackendKind::nccl;
  switch (options.device) {
    case DeviceKind::automatic:
      if (backend != BackendKind::automatic) return nccl;
      return env.launcher != Launcher::threads &&
             cuda_device_count() >= env.local_world_size;
    case DeviceKind::cpu:
      if (nccl) {
        throw ConfigError(
            "[comm] backend = \"nccl\" needs GPUs, but device = \"cpu\"; leave "
            "one of them out");
      }
      return false;
    default:
      if (!nccl && backend != BackendKind::automatic) {
        throw ConfigError(format(
            "[comm] backend = \"{}\" moves the CPU's tensors, but device = "
            "\"cuda\"; leave one of them out",
            to_string(backend)));
      }
      return true;
  }
}

/// Chooses the backend by `options` and the machine.
BackendKind
choose_backend(const CommOptions& options, const RankEnvironment& env) {
  if (on_accelerators(options, env)) return BackendKind::nccl;
  check_one_host(options.backend, env);
  if (options.backend != BackendKind::automatic) return options.backend;
  const bool one_host = env.local_world_size == env.world_size;
  return one_host ? BackendKind::local : BackendKind::gloo;
}

std::unique_ptr<World::Impl>
make_alone(const RankEnvironment& env, const CommOptions& options) {
  local::keep_freed_memory();
  auto impl = std::make_unique<World::Impl>();
  impl->env = env;
  impl->options = options;
  if (on_accelerators(options, env)) impl->kind = BackendKind::nccl;
  impl->use_accelerator();
  impl->observer =
      std::make_shared<Observer>(env.rank, std::make_shared<MemoryBoard>(1));
  impl->group = impl->make("world", {env.rank}, impl->kind);
  return impl;
}

}  // namespace

std::string to_string(BackendKind kind) {
  static constexpr const char* names[] = {"automatic", "local", "gloo", "nccl"};
  return names[static_cast<size_t>(kind)];
}

World::World(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
World::World(World&&) noexcept = default;
World& World::operator=(World&&) noexcept = default;

World::~World() {
  if (!impl_ || !impl_->store || impl_->hub) return;
  impl_->group.reset();
  // Rank 0 serves the store, so it stays until the others have left, unless the
  // job is failing.
  try {
    const auto key = [](int r) { return format("left/{}", r); };
    impl_->store->set(key(rank()), "1");
    if (rank() == 0 && std::uncaught_exceptions() == 0) {
      std::vector<std::string> keys;
      for (int r = 0; r < size(); ++r) keys.push_back(key(r));
      impl_->store->wait(keys, std::chrono::seconds(5));
    }
  } catch (const std::exception&) {
    // A peer that failed has reported it itself.
  }
}

World World::alone(const CommOptions& options) {
  RankEnvironment env;
  env.launcher = Launcher::threads;
  return World(make_alone(env, options));
}

World World::from_environment(const CommOptions& options) {
  install_error_reporter();
  const RankEnvironment env = read_environment();
  if (env.world_size == 1) return World(make_alone(env, options));
  local::keep_freed_memory();
  auto impl = std::make_unique<Impl>();
  impl->env = env;
  impl->options = options;
  impl->kind = choose_backend(options, env);
  impl->store = connect_store(env, options.rendezvous_timeout);
  echelon::exchange(
      *impl->store, "arrived", env.rank, env.world_size,
      to_string(env.launcher), options.rendezvous_timeout,
      format("{}:{}", env.master_addr, env.master_port));
  impl->address = reachable_address(env);
  impl->use_accelerator();
  std::shared_ptr<StatusBoard> board;
  if (impl->kind == BackendKind::local) {
    impl->join_host();
    board = std::make_shared<HostBoard>(impl->host);
  } else {
    board =
        make_store_board(connect_store_again(env, options.rendezvous_timeout));
  }
  impl->observer = std::make_shared<Observer>(env.rank, std::move(board));
  impl->group = impl->make("world", all_ranks(env.world_size), impl->kind);
  return World(std::move(impl));
}

void World::Impl::use_accelerator() {
  if (kind != BackendKind::nccl) return;
  const auto type = load_accelerator(
      options.device == DeviceKind::test ? DeviceKind::test : DeviceKind::cuda);
  device = torch::Device(type, static_cast<c10::DeviceIndex>(env.local_rank));
  set_current_device(device);
}

void World::Impl::join_host() {
  if (host) return;
  if (hub) {
    host = local::join_threads(hub, env.rank);
    return;
  }
  host = local::join_processes(
      store, format("{}/{}", env.job, env.generation), env.rank, env.world_size,
      {.share_tensors = options.share_tensors && env.world_size <= kMaxShared,
       .timeout = options.rendezvous_timeout});
}

Group World::Impl::make(
    const std::string& axis, const std::vector<int>& ranks,
    BackendKind backend_kind) {
  const size_t number = num_groups++;
  if (backend_kind == BackendKind::local && env.world_size > 1) join_host();
  const auto position = std::find(ranks.begin(), ranks.end(), env.rank);
  if (ranks.size() <= 1 || position == ranks.end()) {
    return make_group(nullptr, axis, {env.rank}, 0, backend_kind, device);
  }
  const int rank = static_cast<int>(position - ranks.begin());
  const int size = static_cast<int>(ranks.size());
  // Disjoint groups have the same number; their first rank tells them apart.
  const std::string name = format("group/{}/{}", number, ranks[0]);
  auto group_store = c10::make_intrusive<c10d::PrefixStore>(name, store);
  c10::intrusive_ptr<c10d::Backend> inner;
  torch::Device group_device = torch::kCPU;
  switch (backend_kind) {
    case BackendKind::nccl:
      group_device = device;
      inner =
          make_nccl_backend(group_store, rank, size, options.timeout, device);
      break;
    case BackendKind::gloo:
      inner = connect_together(
          group_store, {axis, rank, size}, options.timeout,
          [&](const c10::intrusive_ptr<c10d::Store>& attempt) {
            return make_gloo_backend(
                attempt, rank, size, address, options.timeout);
          });
      break;
    default:
      inner = local::make_backend(host, ranks, name, options.timeout);
  }
  ObservedBackendOptions observed;
  observed.group = {.number = number, .axis = axis, .ranks = ranks};
  observed.check =
      options.check_collectives && backend_kind != BackendKind::local;
  observed.store = group_store;
  observed.timeout = options.timeout;
  observed.futures_mean_done = backend_kind != BackendKind::nccl;
  auto backend =
      observe_backend(std::move(inner), observer, std::move(observed));
  return make_group(
      std::move(backend), axis, ranks, rank, backend_kind, group_device);
}

int World::rank() const {
  return impl_->env.rank;
}
int World::size() const {
  return impl_->env.world_size;
}
int World::local_rank() const {
  return impl_->env.local_rank;
}
int World::local_size() const {
  return impl_->env.local_world_size;
}
int World::compute_threads() const {
  return threads_of_rank(
      impl_->env, cluster::available_cores(),
      static_cast<int>(std::thread::hardware_concurrency()));
}
int World::node_rank() const {
  return impl_->env.node_rank;
}
int World::generation() const {
  return impl_->env.generation;
}
torch::Device World::device() const {
  return impl_->device;
}
std::string World::backend() const {
  return to_string(impl_->kind);
}
const CommOptions& World::options() const {
  return impl_->options;
}
const Group& World::group() const {
  return *impl_->group;
}
const History& World::history() const {
  return impl_->observer->history();
}
History& World::history() {
  return impl_->observer->history();
}

Group World::new_group(
    const std::string& axis, const std::vector<int>& ranks,
    std::optional<BackendKind> backend) {
  std::vector<int> sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  const bool repeats =
      std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end();
  if (ranks.empty() || repeats || sorted.front() < 0 ||
      sorted.back() >= size()) {
    throw ConfigError(format(
        "new_group \"{}\": the ranks must be different numbers in [0, {}), at "
        "least one",
        axis, size()));
  }
  BackendKind kind = impl_->kind;
  if (backend && *backend != BackendKind::automatic) {
    kind = *backend;
    check_one_host(kind, impl_->env);
  }
  if (kind == BackendKind::nccl && impl_->kind != BackendKind::nccl) {
    throw ConfigError(format(
        "new_group \"{}\": an nccl group needs a world whose backend is nccl, "
        "not {}",
        axis, this->backend()));
  }
  return impl_->make(axis, ranks, kind);
}

std::vector<std::string> World::exchange(const std::string& value) {
  if (size() == 1) return {value};
  return echelon::exchange(
      *impl_->store, format("exchange/{}", impl_->num_exchanges++), rank(),
      size(), value, impl_->options.timeout, "an exchange of values");
}

// The ranks are threads with one store, one board and one hub. The first error
// is kept; a World that ends with it fails the others' collectives, so all
// threads end.
void run_ranks(
    int num_ranks, const std::function<void(World&)>& body,
    const CommOptions& options) {
  if (num_ranks < 1) {
    throw ConfigError(
        format("run_ranks: {} ranks; at least 1 is needed", num_ranks));
  }
  if (num_ranks == 1) {
    World world = World::alone(options);
    body(world);
    return;
  }
  // LibTorch has one flight recorder per process. It is not safe with the gloo
  // groups of several threads (its map is written outside of its lock); the
  // World's history takes its place.
  ::setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/1);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto board = std::make_shared<MemoryBoard>(num_ranks);
  const auto hub = local::make_hub(num_ranks);
  std::once_flag failed;
  std::exception_ptr first_error;
  int failed_rank = 0;
  const auto fail = [&](int rank) {
    std::call_once(failed, [&] {
      first_error = std::current_exception();
      failed_rank = rank;
    });
  };
  const auto run = [&](int rank) {
    try {
      auto impl = std::make_unique<World::Impl>();
      impl->env.rank = impl->env.local_rank = rank;
      impl->env.world_size = impl->env.local_world_size = num_ranks;
      impl->env.launcher = Launcher::threads;
      impl->options = options;
      impl->hub = hub;
      impl->kind = choose_backend(options, impl->env);
      impl->use_accelerator();
      impl->store = store;
      impl->observer = std::make_shared<Observer>(rank, board);
      impl->group = impl->make("world", all_ranks(num_ranks), impl->kind);
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
