#include "echelon/comm/world.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <exception>
#include <thread>

#include "echelon/cluster/host.h"
#include "echelon/comm/gloo/connect_together.h"
#include "echelon/comm/gloo/gloo_backend.h"
#include "echelon/comm/group_impl.h"
#include "echelon/comm/local/local.h"
#include "echelon/comm/nccl/nccl_backend.h"
#include "echelon/comm/observed_backend.h"
#include "echelon/comm/shared_memory/keep_memory.h"
#include "echelon/comm/store/store.h"
#include "echelon/comm/store/store_board.h"
#include "echelon/comm/trace/status_board.h"
#include "echelon/comm/world_impl.h"
#include "echelon/error.h"
#include "echelon/error_report.h"

namespace echelon {
namespace {

/// Each rank passes the others its memory file when they share tensors; more
/// ranks than this stage instead.
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

std::string backend_name(BackendKind kind) {
  switch (kind) {
    case BackendKind::local:
      return "local";
    case BackendKind::gloo:
      return "gloo";
    case BackendKind::nccl:
      return "nccl";
    case BackendKind::automatic:
      return "automatic";
  }
  return "?";
}

}  // namespace

BackendKind
choose_backend(const CommOptions& options, const RankEnvironment& env) {
  const bool one_host = env.local_world_size == env.world_size;
  if (options.backend == BackendKind::local && !one_host) {
    throw ConfigError(
        "[comm] backend = \"local\": the ranks are on several hosts (" +
        std::to_string(env.local_world_size) + " of " +
        std::to_string(env.world_size) +
        " here); use \"gloo\" or \"nccl\", or leave it automatic");
  }
  if (options.backend != BackendKind::automatic) return options.backend;
  if (env.launcher != "threads" &&
      cuda_device_count() >= env.local_world_size) {
    return BackendKind::nccl;
  }
  return one_host ? BackendKind::local : BackendKind::gloo;
}

World::World(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
World::World(World&&) noexcept = default;
World& World::operator=(World&&) noexcept = default;

World::~World() {
  if (!impl_ || !impl_->store || impl_->hub) return;
  impl_->group.reset();
  // Rank 0 serves the store: it stays until the others have left, unless the
  // job is failing.
  try {
    const std::string key = "left/" + std::to_string(rank());
    impl_->store->set(key, "1");
    if (rank() == 0 && std::uncaught_exceptions() == 0) {
      std::vector<std::string> keys;
      for (int r = 0; r < size(); ++r)
        keys.push_back("left/" + std::to_string(r));
      impl_->store->wait(keys, std::chrono::seconds(5));
    }
  } catch (const std::exception&) {
    // A peer that failed has said so itself.
  }
}

World World::alone(const CommOptions& options) {
  local::keep_freed_memory();
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  impl->observer =
      std::make_shared<Observer>(0, std::make_shared<MemoryBoard>(1));
  impl->group = make_group(
      nullptr, nullptr, "world", {0}, 0, BackendKind::local, torch::kCPU);
  return World(std::move(impl));
}

World World::from_environment(const CommOptions& options) {
  install_error_reporter();
  local::keep_freed_memory();
  const RankEnvironment env = read_environment();
  if (env.world_size == 1) {
    World world = alone(options);
    world.impl_->env = env;
    if (choose_backend(options, env) == BackendKind::nccl) {
      world.impl_->kind = BackendKind::nccl;
      world.impl_->use_gpu();
      world.impl_->group = make_group(
          nullptr, nullptr, "world", {0}, 0, BackendKind::nccl,
          world.impl_->device);
    }
    return world;
  }
  auto impl = std::make_unique<Impl>();
  impl->env = env;
  impl->options = options;
  impl->kind = choose_backend(options, env);
  impl->store = connect_store(env, options.rendezvous_timeout);
  echelon::exchange(
      *impl->store, "arrived", env.rank, env.world_size, env.launcher,
      options.rendezvous_timeout,
      env.master_addr + ":" + std::to_string(env.master_port));
  impl->address = reachable_address(env);
  if (impl->kind == BackendKind::nccl) impl->use_gpu();
  std::shared_ptr<StatusBoard> board;
  if (impl->kind == BackendKind::local) {
    impl->join_host();
    board = std::make_shared<HostBoard>(impl->host);
  } else {
    board = std::make_shared<StoreBoard>(
        connect_store_again(env, options.rendezvous_timeout));
  }
  impl->observer = std::make_shared<Observer>(env.rank, std::move(board));
  std::vector<int> all;
  for (int r = 0; r < env.world_size; ++r) all.push_back(r);
  impl->group = impl->make("world", all, impl->kind);
  return World(std::move(impl));
}

void World::Impl::use_gpu() {
  load_cuda();
  set_cuda_device(env.local_rank);
  device = torch::Device(
      torch::kCUDA, static_cast<c10::DeviceIndex>(env.local_rank));
}

void World::Impl::join_host() {
  if (host) return;
  if (hub) {
    host = local::join_threads(hub, env.rank);
    return;
  }
  host = local::join_processes(
      store, env.job + "/" + std::to_string(env.generation), env.rank,
      env.world_size,
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
    return make_group(
        nullptr, nullptr, axis, {env.rank}, 0, backend_kind, device);
  }
  const int rank = static_cast<int>(position - ranks.begin());
  const int size = static_cast<int>(ranks.size());
  // Disjoint groups are numbered alike: their first rank tells them apart.
  const std::string name =
      "group/" + std::to_string(number) + "/" + std::to_string(ranks[0]);
  auto group_store = c10::make_intrusive<c10d::PrefixStore>(name, store);
  c10::intrusive_ptr<c10d::Backend> inner;
  torch::Device group_device = torch::kCPU;
  switch (backend_kind) {
    case BackendKind::nccl:
      group_device = device;
      inner = make_nccl_backend(
          group_store, rank, size, options.timeout, device.index());
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
  auto backend = c10::make_intrusive<ObservedBackend>(
      std::move(inner), observer, std::move(observed));
  return make_group(
      std::move(backend), group_store, axis, ranks, rank, backend_kind,
      group_device);
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
      impl_->env, available_cores(),
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
  return backend_name(impl_->kind);
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
    throw ConfigError(
        "new_group \"" + axis +
        "\": the ranks must be different numbers in "
        "[0, " +
        std::to_string(size()) + "), at least one");
  }
  BackendKind kind = impl_->kind;
  if (backend && *backend != BackendKind::automatic) {
    CommOptions checked = impl_->options;
    checked.backend = *backend;
    kind = choose_backend(checked, impl_->env);
  }
  if (kind == BackendKind::nccl && !impl_->device.is_cuda()) {
    throw ConfigError(
        "new_group \"" + axis +
        "\": an nccl group needs a world whose backend "
        "is nccl, not " +
        this->backend());
  }
  return impl_->make(axis, ranks, kind);
}

std::vector<std::string> World::exchange(const std::string& value) {
  if (size() == 1) return {value};
  const std::string topic =
      "exchange/" + std::to_string(impl_->num_exchanges++);
  return echelon::exchange(
      *impl_->store, topic, rank(), size(), value, impl_->options.timeout,
      "an exchange of values");
}

}  // namespace echelon
