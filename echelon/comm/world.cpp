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
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <numeric>
#include <thread>

#include "echelon/cluster/host.h"
#include "echelon/comm/gloo/gloo_backend.h"
#include "echelon/comm/group_impl.h"
#include "echelon/comm/nccl/nccl_backend.h"
#include "echelon/comm/observed_backend.h"
#include "echelon/comm/store/store.h"
#include "echelon/comm/trace/status_board.h"
#include "echelon/comm/world_impl.h"
#include "echelon/error.h"
#include "echelon/error_report.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

/// With shared tensors each rank passes its memory file to the others; with
/// more ranks than this, tensors are staged instead.
constexpr int kMaxShared = 128;

/// Of threads, for a message at a time: what fills a network adapter.
constexpr int kMessageBlocks = 4;

/// The observer's own time-out comes first: it knows what the others did.
constexpr auto kWatchdogLater = std::chrono::seconds(60);

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

void check_one_host(BackendKind backend, const RankEnvironment& env) {
  if (backend == BackendKind::local && env.local_world_size < env.world_size) {
    throw ConfigError(format(
        "[comm] backend = \"local\": the ranks are on several hosts ({} of {} "
        "here); use \"gloo\" or \"nccl\", or leave it automatic",
        env.local_world_size, env.world_size));
  }
}

/// What NCCL says last: its errors begin with where they were thrown and what
/// their code means.
std::string reason_of(const std::exception& error) {
  const std::string text = without_backtrace(error.what());
  static constexpr std::string_view kLast = "Last error:\n";
  const size_t last = text.rfind(kLast);
  const size_t begin = last == std::string::npos ? 0 : last + kLast.size();
  return text.substr(begin, text.find('\n', begin) - begin);
}

bool by_threads(const RankEnvironment& env) {
  return env.launcher == Launcher::threads;
}

/// Whether GPUs are asked for, and whether the job needs them. By themselves,
/// ranks that are threads take none.
enum class Gpus { none, if_there, needed };
Gpus wanted_gpus(const CommOptions& options, const RankEnvironment& env) {
  const BackendKind backend = options.backend;
  const bool nccl = backend == BackendKind::nccl;
  const bool free = backend == BackendKind::automatic;
  switch (options.device) {
    case DeviceKind::automatic:
      if (nccl) return Gpus::needed;
      return free && !by_threads(env) ? Gpus::if_there : Gpus::none;
    case DeviceKind::cpu:
      if (!nccl) return Gpus::none;
      throw ConfigError(
          "[comm] backend = \"nccl\" needs GPUs, but device = \"cpu\"; leave "
          "one of them out");
    default:
      if (nccl || free) return Gpus::needed;
      throw ConfigError(format(
          "[comm] backend = \"{}\" moves the CPU's tensors, but device is "
          "another one; leave one of them out",
          to_string(backend)));
  }
}

/// What this rank sees, where GPUs are asked for.
RankGpus gpus_seen(const CommOptions& options, const RankEnvironment& env) {
  const bool asked = options.device != DeviceKind::test &&
                     wanted_gpus(options, env) != Gpus::none;
  if (asked) return gpus_of_process(env.rank, env.node_rank, env.local_rank);
  return {.rank = env.rank};
}

// MKL chooses its vector functions in the first call. Where several threads
// make that call together, one of them may get functions of low accuracy, with
// relative errors of 3e-9. So one thread makes it first.
void choose_vector_functions() {
  static std::once_flag once;
  std::call_once(once, [] { at::exp(torch::zeros({8}, torch::kFloat64)); });
}

std::unique_ptr<World::Impl>
make_alone(const RankEnvironment& env, const CommOptions& options) {
  local::keep_freed_memory();
  auto impl = std::make_unique<World::Impl>();
  impl->env = env;
  impl->options = options;
  impl->choose({gpus_seen(options, env)});
  if (!impl->device_index) impl->kind = BackendKind::local;
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

World::World(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {
  choose_vector_functions();
}
World::World(World&&) noexcept = default;
World& World::operator=(World&&) noexcept = default;

World::~World() {
  if (!impl_) return;
  impl_->end_communicators();
  if (!impl_->store || impl_->hub) return;
  impl_->group.reset();
  // Rank 0 may serve the store, so it stays until the others have left. When
  // the job is failing, some may still have to read why, and some may never
  // leave: then it stays for a second at most.
  const bool failing = impl_->failing();
  if (failing && impl_->env.store_is_served) return;
  try {
    const auto key = [](int r) { return format("left/{}", r); };
    impl_->store->set(key(rank()), "1");
    if (rank() == 0) {
      std::vector<std::string> keys;
      for (int r = 0; r < size(); ++r) keys.push_back(key(r));
      impl_->store->wait(keys, std::chrono::seconds(failing ? 1 : 5));
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
  const RankGpus mine = gpus_seen(options, env);
  impl->store = connect_store(env, options.rendezvous_timeout);
  std::vector<RankGpus> all;
  for (const auto& one : echelon::exchange(
           *impl->store, "arrived", env.rank, env.world_size, to_text(mine),
           options.rendezvous_timeout,
           format("{}:{}", env.master_addr, env.master_port))) {
    all.push_back(rank_gpus_from_text(one));
  }
  impl->choose(all);
  avoid_flight_recorder();  // a job on GPUs has Gloo groups too
  if (env.local_world_size == env.world_size) keep_nccl_on_this_host();
  impl->address = reachable_address(env);
  impl->use_accelerator();
  if (impl->device_index) {
    std::array<char, 256> host{};
    ::gethostname(host.data(), host.size() - 1);
    set_error_place(format("{} of {}", impl->device.str(), host.data()));
  }
  std::shared_ptr<StatusBoard> board;
  if (impl->kind == BackendKind::local) {
    impl->join_host();
    board = std::make_shared<HostBoard>(impl->host);
  } else {
    board =
        make_store_board(connect_store_again(env, options.rendezvous_timeout));
  }
  impl->observer = std::make_shared<Observer>(env.rank, std::move(board));
  impl->watch_device();
  impl->group =
      impl->make("world", Impl::all_ranks(env.world_size), impl->kind);
  return World(std::move(impl));
}

std::vector<int> World::Impl::all_ranks(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

void World::Impl::choose(const std::vector<RankGpus>& gpus) {
  const Gpus wanted = wanted_gpus(options, env);
  if (options.device == DeviceKind::test) {
    const int devices = accelerator_count(DeviceKind::test);
    if (devices < env.local_world_size) {
      throw ConfigError(format(
          "[comm] device = \"test\": {} ranks and {} devices",
          env.local_world_size, devices));
    }
    device_index = env.local_rank;
  } else if (wanted != Gpus::none) {
    const auto choice = choose_gpu(gpus, env.rank, wanted == Gpus::needed);
    device_index = choice.index;
    if (env.rank == 0 && !choice.note.empty()) {
      std::fprintf(stderr, "note: %s\n", choice.note.c_str());
    }
  }
  if (device_index) {
    kind = BackendKind::nccl;
    return;
  }
  check_one_host(options.backend, env);
  const bool one_host = env.local_world_size == env.world_size;
  kind = options.backend != BackendKind::automatic ? options.backend
         : one_host                                ? BackendKind::local
                                                   : BackendKind::gloo;
}

void World::Impl::use_accelerator() {
  if (!device_index) return;
  const auto type = load_accelerator(
      options.device == DeviceKind::test ? DeviceKind::test : DeviceKind::cuda);
  device = torch::Device(type, static_cast<c10::DeviceIndex>(*device_index));
  set_current_device(device);
}

// NCCL connects at a group's first call. A barrier makes that now, before the
// model takes the device's memory, and in the same order on all ranks. (Its
// eager mode would serialise the messages of all pairs of ranks.)
c10::intrusive_ptr<c10d::Backend> World::Impl::communicator(
    const std::vector<int>& ranks, int rank,
    const c10::intrusive_ptr<c10d::Store>& group_store, Traffic traffic) {
  const bool for_messages = traffic == Traffic::messages;
  const Communicators::Key key{ranks, for_messages};
  if (auto made = communicators->find(key)) return made;
  auto made = make_nccl_backend(
      group_store, rank, static_cast<int>(ranks.size()),
      options.timeout + kWatchdogLater, device,
      for_messages ? kMessageBlocks : 0);
  communicators->add(key, made);
  c10d::BarrierOptions barrier;
  barrier.asyncOp = false;
  barrier.device = device;
  try {
    if (auto work = made->barrier(barrier)) work->wait();
  } catch (const c10::Error& error) {
    throw CommError(format(
        "rank {} on {} cannot connect to ranks {} over NCCL: {}; "
        "NCCL_DEBUG=INFO shows what it tries, NCCL_SOCKET_IFNAME chooses the "
        "network, and [comm] device = \"cpu\" does without it",
        env.rank, device.str(), join(ranks, ", "), reason_of(error)));
  }
  return made;
}

// A thread that waits for the device cannot be told: its call is the driver's.
// So the observer's thread ends the process, with the error's report. Where the
// ranks are threads it ends the communicators, and with them the calls on the
// device; the rank's next call throws the error.
void World::Impl::watch_device() {
  const bool threads = hub != nullptr;
  observer->on_lost(
      [threads, ended = communicators](const std::exception_ptr& error) {
        if (threads) {
          ended->abort();
          return;
        }
        int code = 1;
        try {
          std::rethrow_exception(error);
        } catch (const std::exception& cause) {
          code = report_error(cause);
        }
        std::fflush(nullptr);
        std::_Exit(code);
      });
}

bool World::Impl::meet(const std::string& place) {
  const std::string all = place + "/all";
  if (store->add(place, 1) == env.world_size) store->set(all, "1");
  const auto deadline = std::chrono::steady_clock::now() + options.timeout;
  while (!store->check({World::Impl::kFailed})) {
    try {
      store->wait({all}, std::chrono::seconds(1));
      return true;
    } catch (const std::exception&) {
      if (std::chrono::steady_clock::now() > deadline) return false;
    }
  }
  return false;
}

// A communicator ends well when all its calls are over on all its ranks. One
// that is dropped earlier fails calls that others still make: the end of one
// rank must not be the failure of another.
void World::Impl::end_communicators() noexcept {
  if (communicators->empty()) return;
  try {
    if (!failing()) {
      synchronize_current_stream(device.type());
      if (meet("end")) {
        observer->poll(/*all=*/true);
        observer->stop_watching();
        communicators->shut_down();
        return;
      }
    }
  } catch (const std::exception& error) {
    std::fprintf(
        stderr, "rank %d: the end of the job failed: %s\n", env.rank,
        without_backtrace(error.what()).c_str());
  }
  observer->stop_watching();
  communicators->abort();
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
    BackendKind backend_kind, Traffic traffic) {
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
      inner = communicator(ranks, rank, group_store, traffic);
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
  observed.device = group_device;
  observed.queued = backend_kind == BackendKind::nccl;
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
    std::optional<BackendKind> backend, Traffic traffic) {
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
  return impl_->make(axis, ranks, kind, traffic);
}

std::vector<std::string> World::exchange(const std::string& value) {
  if (size() == 1) return {value};
  return echelon::exchange(
      *impl_->store, format("exchange/{}", impl_->num_exchanges++), rank(),
      size(), value, impl_->options.timeout, "an exchange of values");
}

std::vector<std::string> World::gather(const std::string& value) {
  if (size() == 1) return {value};
  return echelon::gather(
      *impl_->store, format("gather/{}", impl_->num_exchanges++), rank(),
      size(), value, impl_->options.timeout);
}

}  // namespace echelon
