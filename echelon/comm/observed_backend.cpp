// Every call of the inner backend passes through observe(): it records the call
// and publishes the rank's status, compares the call with the other ranks'
// where that is asked for, forwards it, and wraps its work.
//
// The wrapped work ends the record once, whoever sees the end first: the thread
// that waits, or the callback of an asynchronous call's future. When a call
// fails, the first thread to see it reads the other ranks' statuses and keeps
// the explained error; later waits throw the same one.
#include "echelon/comm/observed_backend.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <functional>
#include <optional>

#include "echelon/comm/shared_memory/failure.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

/// The cause's text, without a C++ stack and without source positions.
std::string text_of(const std::exception_ptr& cause) {
  std::string text;
  try {
    std::rethrow_exception(cause);
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  } catch (const std::exception& error) {
    text = error.what();
  } catch (...) {
    text = "an exception of unknown type";
  }
  if (!text.empty() && text[0] == '[') {
    const size_t end = text.find("] ");
    if (end != std::string::npos) text = text.substr(end + 2);
  }
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) {
    text.pop_back();
  }
  return text;
}

bool already_explained(const std::exception_ptr& cause) {
  try {
    std::rethrow_exception(cause);
  } catch (const local::Failure&) {
    return false;
  } catch (const Error&) {
    return true;
  } catch (...) {
    return false;
  }
}

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

/// Work that tells the observer when it ends, and explains its errors.
class ObservedWork : public c10d::Work {
 public:
  ObservedWork(
      int rank, c10::intrusive_ptr<c10d::Work> inner,
      std::shared_ptr<Observer> observer, ObservedCall call, bool watch)
      : Work(rank),
        inner_(std::move(inner)),
        state_(std::make_shared<State>(std::move(observer), std::move(call))) {
    if (watch) watch_future();
  }

  bool isCompleted() override { return inner_->isCompleted(); }

  bool wait(std::chrono::milliseconds timeout) override {
    state_->begin_wait();
    try {
      inner_->wait(timeout);
    } catch (...) {
      std::rethrow_exception(state_->fail(std::current_exception()));
    }
    state_->end();
    return true;
  }

 private:
  struct State {
    State(std::shared_ptr<Observer> observer_, ObservedCall call_)
        : observer(std::move(observer_)),
          call(std::move(call_)),
          group(*call.group) {
      // The backend may be gone when the call ends.
      call.group = &group;
    }

    void begin_wait() {
      if (!ended) observer->history().begin_wait(call.ticket);
    }
    void end() {
      if (!ended.exchange(true)) observer->end(call);
    }
    std::exception_ptr fail(const std::exception_ptr& cause) {
      std::lock_guard lock(mutex);
      if (!error) error = observer->explain(call, cause);
      if (!ended.exchange(true)) observer->end(call, true);
      return error;
    }

    std::shared_ptr<Observer> observer;
    ObservedCall call;
    const ObservedGroup group;
    std::atomic<bool> ended{false};
    std::mutex mutex;
    std::exception_ptr error;
  };

  void watch_future() {
    c10::intrusive_ptr<c10::ivalue::Future> inner;
    try {
      inner = inner_->getFuture();
    } catch (const c10::Error&) {
      return;  // Gloo's reduce_scatter has none: it ends when it is waited for
    }
    inner->addCallback([state = state_](c10::ivalue::Future& done) {
      if (done.hasError()) {
        state->fail(done.exception_ptr());
      } else {
        state->end();
      }
    });
  }

  c10::intrusive_ptr<c10d::Work> inner_;
  std::shared_ptr<State> state_;
};

class ObservedBackend : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

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
  void startCoalescing() override { inner_->startCoalescing(); }
  WorkPtr endCoalescing() override { return inner_->endCoalescing(); }

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
  /// `detail` must agree among the ranks, as operation, shape and dtype do.
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
    observer_->begin(call);
    try {
      if (options_.check && collective) compare(call.record, detail);
      WorkPtr inner = forward();
      const bool watch = async && collective && options_.futures_mean_done;
      return c10::make_intrusive<ObservedWork>(
          getRank(), std::move(inner), observer_, std::move(call), watch);
    } catch (...) {
      const auto error = observer_->explain(call, std::current_exception());
      observer_->end(call, true);
      std::rethrow_exception(error);
    }
  }

  // Compares the call through the store, under keys of the group and the call's
  // number. A rank that publishes a call has compared the one before, so no
  // rank reads keys of two calls ago.
  void compare(const CollectiveRecord& record, const std::string& detail) {
    const std::string mine = format(
        "{}({} {}{}{})", record.operation, record.dtype,
        shape_text(record.shape), detail.empty() ? "" : ", ", detail);
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
  uint64_t sequence_ = 0;       // collectives begun
  uint64_t peer_sequence_ = 0;  // sends and receives begun
};

}  // namespace

void Observer::begin(ObservedCall& call) {
  call.ticket = history_.begin(call.record);
  call.begun = std::chrono::steady_clock::now();
  std::lock_guard lock(mutex_);
  ++status_.num_running;
  status_.last_begun = StatusEntry(call.record);
  if (call.collective && call.group->number < RankStatus::kGroups) {
    status_.begun[call.group->number] = call.record.sequence + 1;
  }
  board_->publish(rank_, status_);
}

void Observer::end(const ObservedCall& call, bool failed) {
  history_.end(call.ticket, failed);
  std::lock_guard lock(mutex_);
  if (status_.num_running > 0) --status_.num_running;
  if (!failed) {
    ++status_.num_finished;
    status_.last_finished = StatusEntry(call.record);
  }
  board_->publish(rank_, status_);
}

std::exception_ptr Observer::explain(
    const ObservedCall& call, const std::exception_ptr& cause) const {
  if (already_explained(cause)) return cause;
  const StatusEntry entry(call.record);
  const auto waited = std::chrono::steady_clock::now() - call.begun;
  std::string hang;
  if (call.collective) {
    std::vector<std::optional<RankStatus>> statuses;
    for (int rank : call.group->ranks) statuses.push_back(board_->read(rank));
    hang = hang_report(
        {.call = entry,
         .group = call.group->number,
         .ranks = call.group->ranks,
         .rank = rank_,
         .waited_seconds = std::chrono::duration<double>(waited).count()},
        statuses);
  }
  const auto milliseconds =
      std::chrono::duration_cast<std::chrono::milliseconds>(waited).count();
  return std::make_exception_ptr(CommError(format(
      "{} on axis {}, {} {}, failed after {:g} s: {}{}", entry.describe(),
      call.record.axis, call.record.dtype, shape_text(call.record.shape),
      static_cast<double>(milliseconds) / 1000, text_of(cause), hang)));
}

c10::intrusive_ptr<c10d::Backend> observe_backend(
    c10::intrusive_ptr<c10d::Backend> inner, std::shared_ptr<Observer> observer,
    ObservedBackendOptions options) {
  return c10::make_intrusive<ObservedBackend>(
      std::move(inner), std::move(observer), std::move(options));
}

}  // namespace echelon
