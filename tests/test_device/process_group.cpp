// A c10d::Backend with the manners of ProcessGroupNCCL of LibTorch 2.11, over
// Gloo:
//
// - A synchronous call (asyncOp = false) runs on the caller's current stream
//   and returns no Work. An asynchronous one runs on the communicator's own
//   stream, which first waits for the current one; wait() of its Work makes the
//   current stream wait, not the host.
// - Calls between startCoalescing() and endCoalescing() return no Work; the
//   batch runs on the group's communicator and returns one.
// - The group's communicator is made at its first collective. A pair of ranks
//   has a communicator of its own, which is made at the pair's first message.
//   Making one blocks the host until all of its ranks are there.
// - Messages of a pair have no tags: they are matched in order.
// - A Work is complete when the device has done it. A time-out or a lost peer
//   is an error of the device, seen when the host waits.
// - barrier() waits on the host.
// - Only contiguous tensors of this device are taken.
// - allocateTensor() allocates from a pool of the communicator, which must be
//   connected. While a stream is captured, the graph's pool comes first.
// - A collective may hang when its memory is registered on some ranks alone.
//   That is reported.
//
// Calls of one communicator are numbered when they are queued and run in that
// order, whatever streams they are on.
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>

#include "echelon/comm/gloo/gloo_backend.h"
#include "echelon/comm/nccl/nccl_plugin.h"
#include "echelon/text/format.h"
#include "tests/test_device/communicator_order.h"
#include "tests/test_device/graph.h"
#include "tests/test_device/memory.h"
#include "tests/test_device/operators.h"
#include "tests/test_device/runtime.h"

namespace echelon::test_device {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using GlooPtr = c10::intrusive_ptr<c10d::Backend>;

// LibTorch's flight recorder is not safe with the Gloo groups of several
// threads (gloo_backend.h). It reads this when the first group is made.
[[maybe_unused]] const int no_flight_recorder =
    ::setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/1);
using Milliseconds = std::chrono::milliseconds;

/// Runs the calls of a communicator in the order in which they were queued.
class Turns {
 public:
  uint64_t take() {
    std::lock_guard lock(mutex_);
    return next_++;
  }
  void run(uint64_t number, const std::function<void()>& work) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ == number; });
    lock.unlock();
    struct Done {
      Turns& turns;
      ~Done() {
        {
          std::lock_guard lock(turns.mutex_);
          ++turns.done_;
        }
        turns.changed_.notify_all();
      }
    } done{*this};
    work();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t next_ = 0;
  uint64_t done_ = 0;
};

struct Communicator {
  ~Communicator() {
    if (stream != 0) device_of(device).end_stream(stream);
  }

  std::string id;  // the same on all of its ranks
  std::string name;
  std::vector<int> ranks;  // of the group
  int device = 0;
  int stream = 0;  // its own
  GlooPtr gloo;
  Turns turns;
  std::atomic<bool> aborted{false};
  // By peer: messages have no tags, so each is known by its number.
  std::map<int, int> sent;
  std::map<int, int> received;
};
using CommunicatorPtr = std::shared_ptr<Communicator>;

/// Whether the ranks of a communicator give a collective registered memory.
class Registrations {
 public:
  /// Returns whether `registered` differs from what another rank gave the
  /// call.
  bool differ(
      const std::string& communicator, int64_t call, int ranks,
      bool registered) {
    const std::lock_guard lock(mutex_);
    const auto at =
        calls_.try_emplace({communicator, call}, Entry{registered, 0}).first;
    const bool differs = at->second.registered != registered;
    if (++at->second.ranks == ranks) calls_.erase(at);
    return differs;
  }

 private:
  struct Entry {
    bool registered = false;
    int ranks = 0;
  };
  std::mutex mutex_;
  std::map<std::pair<std::string, int64_t>, Entry> calls_;
};

Registrations& registrations() {
  static auto* const all = new Registrations;
  return *all;
}

/// What is known of a call's end.
struct Completion {
  MarkPtr mark;
  std::mutex mutex;
  std::exception_ptr error;
};

class TestWork : public c10d::Work {
 public:
  TestWork(
      int rank, int device, std::shared_ptr<Completion> completion,
      Tensors tensors)
      : Work(rank),
        device_(device),
        completion_(std::move(completion)),
        tensors_(std::move(tensors)) {}

  bool isCompleted() override {
    return device_of(device_).query(completion_->mark);
  }
  bool isSuccess() const override {
    std::lock_guard lock(completion_->mutex);
    return completion_->mark->reached() && !completion_->error;
  }
  std::exception_ptr exception() const override {
    std::lock_guard lock(completion_->mutex);
    return completion_->error;
  }
  bool wait(Milliseconds) override {
    Device& device = device_of(device_);
    device.check();
    device.block(current_stream(device_), completion_->mark);
    tensors_.clear();
    return true;
  }
  void synchronize() override { wait(Milliseconds(0)); }
  void abort() override {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    // ProcessGroupNCCL's future is complete once the call is queued.
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()),
        std::vector<c10::Device>{
            {c10::DeviceType::PrivateUse1,
             static_cast<c10::DeviceIndex>(device_)}});
    future->markCompleted(c10::IValue(tensors_));
    return future;
  }

 private:
  const int device_;
  const std::shared_ptr<Completion> completion_;
  Tensors tensors_;  // kept until the current stream waits
};

class ProcessGroup : public c10d::Backend {
 public:
  ProcessGroup(
      c10::intrusive_ptr<c10d::Store> store, int rank, int size,
      Milliseconds timeout, int device)
      : Backend(rank, size),
        store_(std::move(store)),
        timeout_(timeout),
        device_(device) {
    {
      std::lock_guard lock(device_of(device).mutex());
      number_ = device_of(device).num_communicators++;
    }
    note("made");
  }

  ~ProcessGroup() override {
    if (!over_) stop();
    if (pool_ != 0) end_pool(pool_);
  }

  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }

  void eagerConnectSingleDevice(at::Device) override {
    all();
    eager_ = true;
  }

  bool supportsTensorAlloc(c10::DeviceIndex device) override {
    return !std::ranges::count(options().without_registration, int{device});
  }
  at::Tensor allocateTensor(long size, at::TensorOptions as) override {
    TORCH_CHECK(
        all_,
        "NCCL communicator has not been initialized before mem pool creation");
    TORCH_CHECK(supportsTensorAlloc(static_cast<c10::DeviceIndex>(device_)));
    if (pool_ == 0) {
      static std::atomic<int> last{0};
      pool_ = --last;
      begin_pool(pool_);
    }
    const PoolScope scope(pool_);
    return at::empty({size}, as);
  }

  void startCoalescing() override {
    note("start");
    coalescing_ = true;
    batch_.clear();
    batch_tensors_.clear();
    batch_peers_.clear();
  }

  WorkPtr endCoalescing() override {
    note("end");
    coalescing_ = false;
    auto batch = std::exchange(batch_, {});
    auto tensors = std::exchange(batch_tensors_, {});
    const auto peers = std::exchange(batch_peers_, {});
    Launch launch = std::exchange(batch_launch_, {});
    if (batch.empty()) return nullptr;
    launch.name = "batch of messages";
    return run(
        all(), std::move(launch), std::move(tensors), /*async=*/true,
        [batch = std::move(batch)] {
          std::vector<Message> messages;
          for (const auto& make : batch) messages.push_back(make());
          return [messages](c10d::Backend& gloo) {
            std::vector<WorkPtr> works;
            for (const auto& one : messages) works.push_back(one(gloo));
            for (const auto& work : works) work->wait();
          };
        },
        /*ordered=*/true, peers);
  }

  WorkPtr
  broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const bool root = options.rootRank == getRank();
    return call(
        "broadcast", {{tensors[0], !root}}, options.asyncOp,
        [views = views(tensors), options](c10d::Backend& gloo) mutable {
          return gloo.broadcast(views, options);
        });
  }

  WorkPtr
  allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return call(
        "all_reduce", {{tensors[0], true}}, options.asyncOp,
        [views = views(tensors), options,
         size = getSize()](c10d::Backend& gloo) mutable {
          reduce_all(gloo, views, options.reduceOp, size);
          return WorkPtr();
        });
  }

  WorkPtr allreduce_coalesced(
      Tensors& tensors,
      const c10d::AllreduceCoalescedOptions& options) override {
    return call(
        "all_reduce_coalesced", written(tensors), options.asyncOp,
        [all = views(tensors), options,
         size = getSize()](c10d::Backend& gloo) mutable {
          for (auto& view : all) {
            Tensors one{view};
            reduce_all(gloo, one, options.reduceOp, size);
          }
          return WorkPtr();
        });
  }

  WorkPtr
  reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return call(
        "reduce", {{tensors[0], true}}, options.asyncOp,
        [views = views(tensors), options](c10d::Backend& gloo) mutable {
          return gloo.reduce(views, options);
        });
  }

  WorkPtr _allgather_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::AllgatherOptions& options) override {
    note_memory("all_gather", output);
    return call(
        "all_gather", gathered(output, input), options.asyncOp,
        [to = flat(output), from = flat(input),
         options](c10d::Backend& gloo) mutable {
          return gloo._allgather_base(to, from, options);
        });
  }

  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs,
      const c10d::AllgatherOptions& options) override {
    std::vector<Use> uses;
    for (size_t i = 0; i < inputs.size(); ++i) {
      for (auto& use : gathered(outputs[i], inputs[i])) uses.push_back(use);
    }
    return call(
        "all_gather_coalesced", std::move(uses), options.asyncOp,
        [to = flat(outputs), from = flat(inputs),
         options](c10d::Backend& gloo) mutable {
          for (size_t i = 0; i < to.size(); ++i) {
            gloo._allgather_base(to[i], from[i], options)->wait();
          }
          return WorkPtr();
        });
  }

  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override {
    note_memory("reduce_scatter", input);
    return call(
        "reduce_scatter", {{output, true}, {input, false}}, options.asyncOp,
        [to = flat(output), from = flat(input), options,
         size = getSize()](c10d::Backend& gloo) mutable {
          scatter_sum(gloo, to, from, options, size);
          return WorkPtr();
        });
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs,
      const c10d::ReduceScatterOptions& options) override {
    return call(
        "reduce_scatter_coalesced", pairs(outputs, inputs), options.asyncOp,
        [to = flat(outputs), from = flat(inputs), options,
         size = getSize()](c10d::Backend& gloo) mutable {
          for (size_t i = 0; i < to.size(); ++i) {
            scatter_sum(gloo, to[i], from[i], options, size);
          }
          return WorkPtr();
        });
  }

  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& to_splits,
      std::vector<int64_t>& from_splits,
      const c10d::AllToAllOptions& options) override {
    return call(
        "all_to_all", {{output, true}, {input, false}}, options.asyncOp,
        [to = kernel_view(output), from = kernel_view(input), to_splits,
         from_splits, options](c10d::Backend& gloo) mutable {
          return gloo.alltoall_base(to, from, to_splits, from_splits, options);
        });
  }

  WorkPtr gather(
      std::vector<Tensors>& outputs, Tensors& inputs,
      const c10d::GatherOptions& options) override {
    auto used = written(outputs.empty() ? Tensors{} : outputs[0]);
    used.push_back({inputs[0], false});
    std::vector<Tensors> to;
    if (!outputs.empty()) to.push_back(views(outputs[0]));
    return call(
        "gather", std::move(used), options.asyncOp,
        [to, from = views(inputs), options](c10d::Backend& gloo) mutable {
          return gloo.gather(to, from, options);
        });
  }

  WorkPtr scatter(
      Tensors& outputs, std::vector<Tensors>& inputs,
      const c10d::ScatterOptions& options) override {
    auto used = written(outputs);
    std::vector<Tensors> from;
    if (!inputs.empty()) {
      from.push_back(views(inputs[0]));
      for (const auto& one : inputs[0]) used.push_back({one, false});
    }
    return call(
        "scatter", std::move(used), options.asyncOp,
        [to = views(outputs), from, options](c10d::Backend& gloo) mutable {
          return gloo.scatter(to, from, options);
        });
  }

  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    return message("send", tensors, peer, tag, true);
  }
  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    return message("recv", tensors, peer, tag, false);
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    // As NCCL's error reads.
    TORCH_CHECK_WITH(
        DistBackendError, connects(device_),
        "NCCL error in: NCCLUtils.cpp:94, unhandled system error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.28.9\nncclSystemError: "
        "System call (e.g. socket, malloc) or external library call failed or "
        "device error. \nLast error:\nsocketPollConnect: connect to "
        "10.0.0.7<40123> returned Connection timed out, exceeded error retry "
        "count after 35 attempts");
    const ExchangeDevice guard(device_);
    const at::Tensor token = at::empty(
        {1}, at::TensorOptions()
                 .dtype(at::kFloat)
                 .device(c10::DeviceType::PrivateUse1));
    WorkPtr work = call(
        "barrier", {{token, true}}, options.asyncOp, [](c10d::Backend& gloo) {
          return gloo.barrier(c10d::BarrierOptions{});
        });
    if (options.asyncOp) return work;
    Device& device = device_of(device_);
    device.wait(device.mark(current_stream(device_)), "barrier");
    return nullptr;
  }

  void abort() override {
    note("abort");
    stop();
  }
  void shutdown() override {
    note("shutdown");
    device_of(device_).drain();
    over_ = true;
  }

 private:
  using Use = std::pair<at::Tensor, bool>;  // whether it is written
  using Message = std::function<WorkPtr(c10d::Backend&)>;
  using MakeMessage = std::function<Message()>;
  using Body = std::function<void(c10d::Backend&)>;

  void note(const std::string& what) {
    device_of(device_).note(format("{} {}", number_, what));
  }

  // `large`: what NVLink SHARP wants registered, the output of an all-gather
  // and the input of a reduce-scatter.
  void note_memory(const char* name, const at::Tensor& large) {
    Device& device = device_of(device_);
    const auto address = reinterpret_cast<uintptr_t>(large.const_data_ptr());
    const bool registered = pool_ != 0 && allocation_of(address).first == pool_;
    {
      const std::lock_guard lock(device.mutex());
      ++(registered ? device.counts.registered : device.counts.unregistered);
    }
    if (!options().sanitize) return;
    if (!registrations().differ(
            all()->id, ++large_calls_, getSize(), registered)) {
      return;
    }
    device.add_report(
        Finding::mixed_registration,
        format(
            "{} has registered memory on some ranks alone, {} on this one:\n{}",
            name, registered ? "registered" : "unregistered",
            CallStack::here().text()));
  }

  static Tensors views(const Tensors& tensors) {
    Tensors result;
    for (const auto& one : tensors) result.push_back(kernel_view(one));
    return result;
  }
  static at::Tensor flat(const at::Tensor& tensor) {
    return kernel_view(tensor).view({-1});
  }
  static Tensors flat(const Tensors& tensors) {
    Tensors result;
    for (const auto& one : tensors) result.push_back(flat(one));
    return result;
  }
  static std::vector<Use> written(const Tensors& tensors) {
    std::vector<Use> uses;
    for (const auto& one : tensors) uses.emplace_back(one, true);
    return uses;
  }
  static std::vector<Use> pairs(const Tensors& outputs, const Tensors& inputs) {
    auto uses = written(outputs);
    for (const auto& one : inputs) uses.emplace_back(one, false);
    return uses;
  }

  // In place, when the input is this rank's part of the output, that part is
  // not written.
  std::vector<Use> gathered(const at::Tensor& output, const at::Tensor& input) {
    const at::Tensor all = output.view({-1});
    const int64_t length = input.numel();
    const int64_t begin = getRank() * length;
    if (length == 0 ||
        all.narrow(0, begin, length).data_ptr() != input.data_ptr()) {
      return {{output, true}, {input, false}};
    }
    return {
        {all.narrow(0, 0, begin), true},
        {all.narrow(0, begin + length, all.numel() - begin - length), true},
        {input, false}};
  }

  // NCCL knows averages, Gloo does not.
  static void reduce_all(
      c10d::Backend& gloo, Tensors& tensors, const c10d::ReduceOp& op,
      int size) {
    const bool average = op == c10d::ReduceOp::AVG;
    c10d::AllreduceOptions options;
    options.reduceOp = average ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
    gloo.allreduce(tensors, options)->wait();
    if (average) tensors[0].div_(size);
  }
  static void scatter_sum(
      c10d::Backend& gloo, at::Tensor& to, at::Tensor& from,
      c10d::ReduceScatterOptions options, int size) {
    const bool average = options.reduceOp == c10d::ReduceOp::AVG;
    if (average) options.reduceOp = c10d::ReduceOp::SUM;
    gloo._reduce_scatter_base(to, from, options)->wait();
    if (average) to.div_(size);
  }

  /// Makes a communicator; blocks the host until all of `ranks` do.
  CommunicatorPtr connect(const std::string& name, std::vector<int> ranks) {
    device_of(device_).check();
    auto made = std::make_shared<Communicator>();
    const auto position = std::ranges::find(ranks, getRank()) - ranks.begin();
    auto store = c10::make_intrusive<c10d::PrefixStore>("nccl/" + name, store_);
    if (position == 0) {
      static std::atomic<int64_t> next{0};
      store->set("id", format("{}/{}", ::getpid(), next++));
    }
    store->wait({"id"}, timeout_);
    const auto id = store->get("id");
    made->id = std::string(id.begin(), id.end());
    order_book().member(made->id, static_cast<int>(position), device_);
    made->gloo = make_gloo_backend(
        store, static_cast<int>(position), static_cast<int>(ranks.size()),
        "127.0.0.1", timeout_);
    made->name = name;
    made->ranks = std::move(ranks);
    made->device = device_;
    made->stream = device_of(device_).new_stream();
    return made;
  }

  CommunicatorPtr all() {
    if (!all_) {
      std::vector<int> ranks;
      for (int rank = 0; rank < getSize(); ++rank) ranks.push_back(rank);
      all_ = connect("all", std::move(ranks));
    }
    return all_;
  }

  CommunicatorPtr pair(int peer) {
    if (eager_) return all();
    auto& known = pairs_[peer];
    if (!known) {
      const int low = std::min(peer, getRank());
      const int high = std::max(peer, getRank());
      known = connect(format("pair/{}:{}", low, high), {low, high});
      note(format("connected {}", peer));
    }
    return known;
  }

  void check(const at::Tensor& tensor) const {
    TORCH_CHECK(
        tensor.device().type() == c10::DeviceType::PrivateUse1 &&
            tensor.device().index() == device_,
        "Tensors must be CUDA and dense (test device ", device_, "), not on ",
        tensor.device());
    TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
    TORCH_CHECK(
        tensor.scalar_type() != at::kShort, "Unconvertible NCCL type Short");
  }

  WorkPtr call(
      const char* name, std::vector<Use> uses, bool async,
      std::function<WorkPtr(c10d::Backend&)> body) {
    TORCH_CHECK(
        !coalescing_, "test device: collectives within a batch of messages");
    TORCH_CHECK(!over_, "the communicator has ended");
    note(name);
    return run(
        all(), launch_of(name, uses), tensors_of(uses), async,
        [body = std::move(body)] {
          return [body](c10d::Backend& gloo) {
            if (const WorkPtr work = body(gloo)) work->wait();
          };
        });
  }

  Launch launch_of(const char* name, const std::vector<Use>& uses) const {
    Launch launch{.name = name, .collective = true};
    for (const auto& [tensor, is_written] : uses) {
      check(tensor);
      launch.accesses.push_back(access_of(tensor, is_written));
    }
    return launch;
  }

  static Tensors tensors_of(const std::vector<Use>& uses) {
    Tensors tensors;
    for (const auto& [tensor, is_written] : uses) tensors.push_back(tensor);
    return tensors;
  }

  WorkPtr message(
      const char* name, const Tensors& tensors, int peer, int tag, bool sends) {
    const at::Tensor& tensor = tensors[0];
    check(tensor);
    TORCH_CHECK(!over_, "the communicator has ended");
    note(format("{} {}", name, peer));
    TORCH_CHECK(!coalescing_ || tag != kBrokenTag, "the message is broken");
    const CommunicatorPtr to = coalescing_ ? all() : pair(peer);
    const int at = static_cast<int>(
        std::ranges::find(to->ranks, peer) - to->ranks.begin());
    // Each time that it is queued, it is another message.
    const MakeMessage body = [view = flat(tensor), at, to, peer, sends] {
      const int number = (sends ? to->sent : to->received)[peer]++;
      return [view, at, number, sends](c10d::Backend& gloo) {
        Tensors one{view};
        return sends ? gloo.send(one, at, number) : gloo.recv(one, at, number);
      };
    };
    if (coalescing_) {
      batch_.push_back(body);
      batch_peers_.insert(at);
      batch_tensors_.push_back(tensor);
      batch_launch_.accesses.push_back(access_of(tensor, !sends));
      return nullptr;
    }
    Launch launch{
        .name = name,
        .accesses = {access_of(tensor, !sends)},
        .collective = true};
    return run(
        to, std::move(launch), tensors, /*async=*/true,
        [body] {
          return [one = body()](c10d::Backend& gloo) { one(gloo)->wait(); };
        },
        /*ordered=*/to == all_);
  }

  // `make_body` is called each time that the call is queued: once, and at each
  // replay of a graph that has it.
  // `peers`: of a batch of messages; none: all ranks take part.
  // `ordered`: its place among the calls of other communicators matters. A
  // message of a pair on the pair's communicator may be posted early.
  WorkPtr
  run(const CommunicatorPtr& on, Launch launch, Tensors tensors, bool async,
      std::function<Body()> make_body, bool ordered = true,
      const std::set<int>& peers = {}) {
    Device& device = device_of(device_);
    device.check();
    launch.collective = true;
    const int current = current_stream(device_);
    const int stream = async ? on->stream : current;
    if (async) device.block(stream, device.mark(current));
    auto completion = std::make_shared<Completion>();
    launch.make_work = [on, make_body = std::move(make_body), completion,
                        ordered, name = launch.name, peers,
                        device_index = device_]() -> std::function<void()> {
      if (ordered) note_order(device_index, *on, name, peers);
      const uint64_t turn = on->turns.take();
      return [on, turn, body = make_body(), completion] {
        on->turns.run(turn, [&] {
          wait_while_held(on->aborted);
          if (on->aborted) return;
          try {
            const c10::InferenceMode no_autograd(false);
            body(*on->gloo);
          } catch (...) {
            std::lock_guard lock(completion->mutex);
            completion->error = std::current_exception();
            throw;
          }
        });
      };
    };
    device.launch(stream, std::move(launch), nullptr);
    completion->mark = device.mark(stream);
    if (!async) return nullptr;
    return c10::make_intrusive<TestWork>(
        getRank(), device_, std::move(completion), std::move(tensors));
  }

  // Only ranks that are threads of one process are compared.
  static void note_order(
      int device, const Communicator& on, const std::string& call,
      const std::set<int>& peers) {
    if (!options().sanitize) return;
    auto found = order_book().add(device, on.id, on.name, call, peers);
    if (!found) return;
    device_of(device).add_report(
        Finding::communicator_order, *found + "\n" + CallStack::here().text());
  }

  void stop() {
    over_ = true;
    const auto end = [](const CommunicatorPtr& one) {
      if (one) one->aborted = true;
    };
    end(all_);
    for (const auto& [peer, one] : pairs_) end(one);
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const Milliseconds timeout_;
  const int device_;
  int number_ = 0;  // of the device's communicators
  bool eager_ = false;
  bool over_ = false;
  int pool_ = 0;             // of allocateTensor(); 0: not made yet
  int64_t large_calls_ = 0;  // all-gathers and reduce-scatters
  CommunicatorPtr all_;
  std::map<int, CommunicatorPtr> pairs_;
  bool coalescing_ = false;
  std::vector<MakeMessage> batch_;
  std::set<int> batch_peers_;
  Tensors batch_tensors_;
  Launch batch_launch_;
};

void set_device(int index) {
  set_current_device(index);
  here().note("set_device");
}

void synchronize_current_stream() {
  Device& device = here();
  device.note("synchronize");
  device.wait(device.mark(current_stream(device.index())), "stream");
}

c10::intrusive_ptr<c10d::Backend> make_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    Milliseconds timeout, int device_index, int most_blocks) {
  if (most_blocks > 0) {
    here().note("make " + std::to_string(size) + " ranks of few blocks");
  }
  return c10::make_intrusive<ProcessGroup>(
      store, rank, size, timeout, device_index);
}

constexpr nccl::Plugin kPlugin{
    nccl::Plugin::kVersion,
    c10::DeviceType::PrivateUse1,
    &num_devices,
    &set_device,
    &synchronize_current_stream,
    &make_backend,
    nullptr,
    nullptr,
    &make_graph};

}  // namespace
}  // namespace echelon::test_device

extern "C" __attribute__((visibility("default"))) const echelon::nccl::Plugin*
echelon_nccl_plugin() {
  return &echelon::test_device::kPlugin;
}
