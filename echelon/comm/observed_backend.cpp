// Every call of the inner backend passes through observe(): it records the call
// and publishes the rank's status, compares the call with the other ranks'
// where that is asked for, forwards it, and wraps its work.
//
// The record ends once, for whoever sees the end first: the thread that waits,
// the callback of an asynchronous call's future, or the observer, which asks
// calls on a device. When a call fails, the first thread to see it reads the
// other ranks' statuses and keeps the explained error; later waits throw the
// same one.
#include "echelon/comm/observed_backend.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/Event.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <functional>
#include <optional>
#include <utility>

#include "echelon/comm/nccl/accelerator.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

std::string reduce_name(const c10d::ReduceOp& op) {
  switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
    case c10d::ReduceOp::SUM:
      return "sum";
    case c10d::ReduceOp::AVG:
      return "avg";
    case c10d::ReduceOp::MIN:
      return "min";
    case c10d::ReduceOp::MAX:
      return "max";
    default:
      return "other";
  }
}

const at::Tensor& first(const std::vector<at::Tensor>& tensors) {
  static const at::Tensor none;
  return tensors.empty() ? none : tensors.front();
}

/// What the host has given to the device's current stream so far.
class StreamWork : public c10d::Work {
 public:
  explicit StreamWork(c10::Device device) : event_(device.type()) {
    event_.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
  bool isCompleted() override { return event_.query(); }

 private:
  c10::Event event_;
};

/// Asks a work without keeping it alive, because a work keeps its tensors.
class WeakWork : public c10d::Work {
 public:
  explicit WeakWork(const c10::intrusive_ptr<c10d::Work>& work) : work_(work) {}
  bool isCompleted() override {
    const auto work = work_.lock();
    return !work || work->isCompleted();
  }
  std::exception_ptr exception() const override {
    const auto work = work_.lock();
    return work ? work->exception() : nullptr;
  }

 private:
  c10::weak_intrusive_ptr<c10d::Work> work_;
};

bool has_streams(c10::Device device) {
  return at::accelerator::isAccelerator(device.type());
}

/// The work of one call or of a batch: it tells the observer when it ends, and
/// explains its errors.
class ObservedWork : public c10d::Work {
 public:
  enum class Ends {
    waited,  // when it has been waited for
    future,  // also when its future is complete
    queued,  // when the device is done, which the observer finds out
  };

  ObservedWork(
      int rank, c10::intrusive_ptr<c10d::Work> inner,
      std::shared_ptr<Observer> observer, std::shared_ptr<ObservedCalls> calls,
      Ends ends, c10::Device device)
      : Work(rank),
        inner_(std::move(inner)),
        observer_(std::move(observer)),
        calls_(std::move(calls)),
        ends_(ends),
        device_(device) {
    if (ends == Ends::future) watch_future();
  }

  bool isCompleted() override {
    // What is captured is not run, and may not be asked.
    return !is_capturing(device_) && inner_->isCompleted();
  }

  bool wait(std::chrono::milliseconds timeout) override {
    if (!calls_->ended && ends_ != Ends::queued) {
      for (const auto& call : calls_->calls) {
        observer_->history().begin_wait(call.ticket);
      }
    }
    const bool marks =
        ends_ == Ends::queued && has_streams(device_) && !calls_->ended;
    if (marks) {
      for (const auto& call : calls_->calls) {
        observer_->history().mark_wait(call.ticket);
      }
    }
    try {
      if (auto lost = observer_->lost()) std::rethrow_exception(lost);
      inner_->wait(timeout);
    } catch (...) {
      std::rethrow_exception(
          observer_->fail(*calls_, std::current_exception()));
    }
    if (ends_ != Ends::queued) {
      observer_->end(*calls_);
    } else if (marks) {
      for (const auto& call : calls_->calls) {
        observer_->history().mark_end(call.ticket);
      }
      // The current stream waits for the call, so the call is over when what
      // the stream does next begins.
      auto reached = c10::make_intrusive<StreamWork>(device_);
      const std::lock_guard lock(calls_->mutex);
      calls_->asked = std::move(reached);
    }
    return true;
  }

 private:
  void watch_future() {
    c10::intrusive_ptr<c10::ivalue::Future> inner;
    try {
      inner = inner_->getFuture();
    } catch (const c10::Error&) {
      return;  // Gloo's reduce_scatter has none: it ends when it is waited for
    }
    inner->addCallback(
        [observer = observer_, calls = calls_](c10::ivalue::Future& done) {
          if (done.hasError()) {
            observer->fail(*calls, done.exception_ptr());
          } else {
            observer->end(*calls);
          }
        });
  }

  c10::intrusive_ptr<c10d::Work> inner_;
  std::shared_ptr<Observer> observer_;
  std::shared_ptr<ObservedCalls> calls_;
  const Ends ends_;
  const c10::Device device_;
};

class ObservedBackend : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Calls = std::vector<ObservedCall>;

  ObservedBackend(
      c10::intrusive_ptr<c10d::Backend> inner,
      std::shared_ptr<Observer> observer, ObservedBackendOptions options)
      : Backend(inner->getRank(), inner->getSize()),
        inner_(std::move(inner)),
        observer_(std::move(observer)),
        options_(std::move(options)) {}

  const std::string getBackendName() const override {
    return inner_->getBackendName();
  }
  bool supportsTensorAlloc(c10::DeviceIndex device) override {
    return inner_->supportsTensorAlloc(device);
  }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return inner_->allocateTensor(size, std::move(options));
  }
  void shutdown() override { inner_->shutdown(); }
  void abort() override { inner_->abort(); }

  // Between the two, calls return no work: that of the batch is theirs.
  void startCoalescing() override {
    inner_->startCoalescing();
    batch_.emplace();
  }
  WorkPtr endCoalescing() override {
    auto calls = std::exchange(batch_, std::nullopt).value_or(Calls());
    if (calls.empty()) return inner_->endCoalescing();
    return watched(std::move(calls), /*over_with_future=*/false, [&] {
      return inner_->endCoalescing();
    });
  }

  WorkPtr
  broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return observe(
        "broadcast", first(tensors), root_text(options.rootRank),
        options.asyncOp, [&] { return inner_->broadcast(tensors, options); });
  }

  WorkPtr
  allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return observe(
        "all_reduce", first(tensors), reduce_name(options.reduceOp),
        options.asyncOp, [&] { return inner_->allreduce(tensors, options); });
  }

  WorkPtr allreduce_coalesced(
      Tensors& tensors,
      const c10d::AllreduceCoalescedOptions& options) override {
    return observe(
        "all_reduce_coalesced", first(tensors),
        format(
            "{} of {} tensors", reduce_name(options.reduceOp), tensors.size()),
        options.asyncOp,
        [&] { return inner_->allreduce_coalesced(tensors, options); });
  }

  WorkPtr
  reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return observe(
        "reduce", first(tensors),
        format(
            "{}, {}", reduce_name(options.reduceOp),
            root_text(options.rootRank)),
        options.asyncOp, [&] { return inner_->reduce(tensors, options); });
  }

  WorkPtr _allgather_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::AllgatherOptions& options) override {
    return observe("all_gather", input, "", options.asyncOp, [&] {
      return inner_->_allgather_base(output, input, options);
    });
  }

  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs,
      const c10d::AllgatherOptions& options) override {
    return observe(
        "all_gather_coalesced", first(inputs),
        format("{} tensors", inputs.size()), options.asyncOp, [&] {
          return inner_->allgather_into_tensor_coalesced(
              outputs, inputs, options);
        });
  }

  WorkPtr gather(
      std::vector<Tensors>& outputs, Tensors& inputs,
      const c10d::GatherOptions& options) override {
    return observe(
        "gather", first(inputs), root_text(options.rootRank), options.asyncOp,
        [&] { return inner_->gather(outputs, inputs, options); });
  }

  WorkPtr scatter(
      Tensors& outputs, std::vector<Tensors>& inputs,
      const c10d::ScatterOptions& options) override {
    return observe(
        "scatter", first(outputs), root_text(options.rootRank), options.asyncOp,
        [&] { return inner_->scatter(outputs, inputs, options); });
  }

  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override {
    return observe(
        "reduce_scatter", input, reduce_name(options.reduceOp), options.asyncOp,
        [&] { return inner_->_reduce_scatter_base(output, input, options); });
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs,
      const c10d::ReduceScatterOptions& options) override {
    return observe(
        "reduce_scatter_coalesced", first(inputs),
        format(
            "{} of {} tensors", reduce_name(options.reduceOp), inputs.size()),
        options.asyncOp, [&] {
          return inner_->reduce_scatter_tensor_coalesced(
              outputs, inputs, options);
        });
  }

  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input,
      std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override {
    // With unequal splits the shapes differ by design: only the row must agree.
    const bool equal = output_splits.empty() && input_splits.empty();
    const at::Tensor row =
        equal || input.dim() == 0 ? input : input.narrow(0, 0, 0);
    return observe("all_to_all", row, "", options.asyncOp, [&] {
      return inner_->alltoall_base(
          output, input, output_splits, input_splits, options);
    });
  }

  WorkPtr send(Tensors& tensors, int destination, int tag) override {
    return observe(
        "send", first(tensors), "", true,
        [&] { return inner_->send(tensors, destination, tag); }, false);
  }

  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    return observe(
        "recv", first(tensors), "", true,
        [&] { return inner_->recv(tensors, source, tag); }, false);
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return observe("barrier", at::Tensor(), "", options.asyncOp, [&] {
      return inner_->barrier(options);
    });
  }

 private:
  static std::string root_text(int64_t root) { return format("root {}", root); }

  /// Runs one call of the inner backend: record, compare, forward, watch.
  /// `detail` must agree among the ranks, as operation, label, shape and dtype
  /// do.
  WorkPtr observe(
      const char* operation, const at::Tensor& tensor,
      const std::string& detail, bool async,
      const std::function<WorkPtr()>& forward, bool collective = true) {
    ObservedCall call;
    call.group = &options_.group;
    call.collective = collective;
    call.record.sequence = collective ? sequence_++ : peer_sequence_++;
    call.record.operation = operation;
    call.record.axis = options_.group.axis;
    call.record.label = LabelScope::current();
    if (tensor.defined()) {
      call.record.shape = tensor.sizes().vec();
      call.record.dtype = c10::getDtypeNames(tensor.scalar_type()).first;
      call.record.bytes = static_cast<int64_t>(tensor.nbytes());
    }
    if (auto lost = observer_->lost()) std::rethrow_exception(lost);
    if (options_.queued && !is_capturing(options_.device)) observer_->poll();
    observer_->begin(call);
    const bool over_with_future = async && collective && !options_.queued;
    const auto compared = [&] {
      if (options_.check && collective) compare(call.record, detail);
      return forward();
    };
    if (!batch_) {
      return watched({call}, over_with_future, compared);
    }
    try {
      const WorkPtr work = compared();
      batch_->push_back(std::move(call));
      return work;
    } catch (...) {
      ObservedCalls failed({call});
      std::rethrow_exception(observer_->fail(failed, std::current_exception()));
    }
  }

  // The work of `calls`, which `forward` makes.
  WorkPtr watched(
      Calls list, bool over_with_future,
      const std::function<WorkPtr()>& forward) {
    using Ends = ObservedWork::Ends;
    auto calls = std::make_shared<ObservedCalls>(std::move(list));
    WorkPtr inner;
    try {
      inner = forward();
    } catch (...) {
      std::rethrow_exception(observer_->fail(*calls, std::current_exception()));
    }
    // What is captured has no end; nobody may ask it.
    if (is_capturing(options_.device)) observer_->end(*calls);
    const Ends ends = options_.queued    ? Ends::queued
                      : over_with_future ? Ends::future
                                         : Ends::waited;
    if (calls->ended) {
      // Nothing is left to watch.
    } else if (ends == Ends::queued && inner) {
      calls->asked = has_streams(options_.device)
                         ? WorkPtr(c10::make_intrusive<WeakWork>(inner))
                         : inner;
    } else if (ends == Ends::queued && has_streams(options_.device)) {
      // It is over for the host, and runs on the current stream.
      for (const auto& call : calls->calls) {
        observer_->history().mark_end(call.ticket);
      }
      calls->asked = c10::make_intrusive<StreamWork>(options_.device);
    }
    if (calls->asked) {
      observer_->watch(calls, options_.timeout);
    } else if (!inner) {
      observer_->end(*calls);
    }
    if (!inner) return nullptr;
    return c10::make_intrusive<ObservedWork>(
        getRank(), std::move(inner), observer_, std::move(calls), ends,
        options_.device);
  }

  // Compares the call through the store, under keys of the group and the call's
  // number. A rank that publishes a call has compared the one before, so no
  // rank reads keys of two calls ago.
  void compare(const CollectiveRecord& record, const std::string& detail) {
    const std::string mine = format(
        "{}{}({} {}{}{})", record.operation,
        record.label.empty() ? "" : format(" \"{}\"", record.label),
        record.dtype, shape_text(record.shape), detail.empty() ? "" : ", ",
        detail);
    const auto key = [&](uint64_t sequence, int rank) {
      return format("check/{}/{}/{}", options_.group.number, sequence, rank);
    };
    const uint64_t sequence = record.sequence;
    options_.store->set(key(sequence, getRank()), mine);
    std::vector<std::string> keys;
    for (int rank = 0; rank < getSize(); ++rank) {
      keys.push_back(key(sequence, rank));
    }
    try {
      options_.store->wait(keys, options_.timeout);
    } catch (const std::exception&) {
      throw std::runtime_error("timed out waiting for the other ranks to call");
    }
    bool same = true;
    std::string all;
    for (size_t rank = 0; rank < keys.size(); ++rank) {
      const std::string other = options_.store->get_to_str(keys[rank]);
      same = same && other == mine;
      all += format("\n  rank {} called {}", options_.group.ranks[rank], other);
    }
    if (sequence >= 2) options_.store->deleteKey(key(sequence - 2, getRank()));
    if (!same) {
      throw std::runtime_error("the ranks called different things:" + all);
    }
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
  std::shared_ptr<Observer> observer_;
  ObservedBackendOptions options_;
  std::optional<Calls> batch_;  // between startCoalescing and endCoalescing
  uint64_t sequence_ = 0;       // collectives begun
  uint64_t peer_sequence_ = 0;  // sends and receives begun
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> observe_backend(
    c10::intrusive_ptr<c10d::Backend> inner, std::shared_ptr<Observer> observer,
    ObservedBackendOptions options) {
  return c10::make_intrusive<ObservedBackend>(
      std::move(inner), std::move(observer), std::move(options));
}

}  // namespace echelon
