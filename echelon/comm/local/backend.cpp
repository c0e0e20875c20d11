// c10d's interface to a Communicator: stages the tensors of a call, issues the
// operation, and hands out the work that completes with it.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <thread>

#include "echelon/comm/local/local.h"
#include "echelon/comm/local/staging.h"
#include "echelon/comm/local/work.h"
#include "echelon/text/format.h"

namespace echelon::local {
namespace {

// How long shutdown() leaves other threads to complete what has arrived.
constexpr std::chrono::seconds kShutdownLimit{1};

class LocalBackend : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  LocalBackend(
      std::shared_ptr<Communicator> group, std::chrono::milliseconds timeout)
      : Backend(group->rank(), group->size()),
        group_(std::move(group)),
        timeout_(timeout),
        pending_(std::make_shared<std::atomic<int>>(0)) {}

  const std::string getBackendName() const override { return "local"; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    timeout_ = timeout;
    group_->set_timeout(timeout);
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>("local", timeout_);
  }
  uint64_t getSequenceNumberForGroup() override { return group_->sequence(); }
  void setSequenceNumberForGroup() override {}  // counted from 0 on every rank
  c10d::ErrorType getError() override {
    return group_->failed() ? c10d::ErrorType::COMM_ERROR
                            : c10d::ErrorType::SUCCESS;
  }
  void abort() override { group_->abort("abort() was called"); }

  // Operations whose peers have arrived complete, even if nobody waits for
  // them; the others fail.
  void shutdown() override {
    const auto end = std::chrono::steady_clock::now() + kShutdownLimit;
    while (*pending_ > 0 && group_->progress() < *pending_ &&
           std::chrono::steady_clock::now() < end) {
      std::this_thread::yield();
    }
    if (*pending_ > 0) {
      group_->abort("shutdown() was called while operations were pending");
    }
  }

  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>&, const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& options) override {
    std::vector<int> host_ranks;
    std::string name = group_->name() + "/";
    for (const int r : ranks) {
      check_rank("split", "rank", r);
      host_ranks.push_back(group_->host_rank(r));
      name += std::to_string(r) + ",";
    }
    if (options != nullptr && !options->group_name.empty()) {
      name = options->group_name;
    }
    return make_backend(
        group_->host(), host_ranks, name,
        options != nullptr ? options->timeout : timeout_);
  }

  void startCoalescing() override {
    coalescing_ = true;
    coalesced_.clear();
  }

  WorkPtr endCoalescing() override {
    coalescing_ = false;
    const auto works = std::exchange(coalesced_, {});
    Tensors results;
    for (const auto& work : works) {
      const auto own = work->result();
      results.insert(results.end(), own.begin(), own.end());
    }
    auto all = c10::make_intrusive<LocalWork>(
        rank_, c10d::OpType::COALESCED, std::move(results));
    struct Remaining {
      std::atomic<size_t> works;
      std::mutex mutex;
      std::exception_ptr error;
    };
    auto remaining = std::make_shared<Remaining>();
    remaining->works = works.size() + 1;
    const auto one_done = [all, remaining](std::exception_ptr error) {
      {
        std::lock_guard lock(remaining->mutex);
        if (remaining->error == nullptr) {
          remaining->error = error;
        }
      }
      if (remaining->works.fetch_sub(1) == 1) {
        all->end(remaining->error);
        all->notify();
      }
    };
    for (const auto& work : works) {
      for (const auto& operation : work->operations()) {
        all->add(operation);
      }
    }
    for (const auto& work : works) {
      work->getFuture()->addCallback([one_done](c10::ivalue::Future& future) {
        one_done(future.hasError() ? future.exception_ptr() : nullptr);
      });
    }
    one_done(nullptr);
    return all;
  }

  WorkPtr
  broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto& tensor = only("broadcast", tensors);
    const int root = checked_root("broadcast", options);
    const auto shape = shape_of("broadcast", tensor);
    auto staged = stage(tensor, rank_ == root ? Use::input : Use::output);
    return issue(
        c10d::OpType::BROADCAST, {tensor}, {staged}, options, [&](Issue how) {
          return group_->broadcast(staged.data(), shape, root, std::move(how));
        });
  }

  WorkPtr
  allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto& tensor = only("all_reduce", tensors);
    return all_reduce(c10d::OpType::ALLREDUCE, tensor, {tensor}, options);
  }

  WorkPtr allreduce_coalesced(
      Tensors& tensors,
      const c10d::AllreduceCoalescedOptions& options) override {
    check_coalesced("all_reduce", tensors);
    if (tensors.size() == 1) {
      return allreduce(tensors, options);
    }
    const auto flat = flatten(tensors);
    return all_reduce(
        c10d::OpType::ALLREDUCE_COALESCED, flat, tensors, options,
        [tensors, flat] { unflatten(flat, tensors); });
  }

  WorkPtr
  reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto& tensor = only("reduce", tensors);
    const int root = checked_root("reduce", options);
    const auto shape = shape_of("reduce", tensor);
    const auto op = reduction_of("reduce", options.reduceOp, tensor);
    auto staged = stage(tensor, rank_ == root ? Use::both : Use::input);
    return issue(
        c10d::OpType::REDUCE, {tensor}, {staged}, options, [&](Issue how) {
          return group_->reduce(staged.data(), shape, op, root, std::move(how));
        });
  }

  WorkPtr allgather(
      std::vector<Tensors>& outputs, Tensors& inputs,
      const c10d::AllgatherOptions& options) override {
    auto& input = only("all_gather", inputs);
    check_list("all_gather", outputs.at(0), size_);
    const auto shape = shape_of("all_gather", input);
    std::vector<Staged> staged;
    const auto data =
        stage_list<char>("all_gather", outputs[0], input, Use::output, staged);
    auto in = stage(input, Use::input);
    staged.push_back(in);
    return issue(
        c10d::OpType::ALLGATHER, outputs[0], staged, options, [&](Issue how) {
          return group_->all_gather(in.data(), data, shape, std::move(how));
        });
  }

  WorkPtr _allgather_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::AllgatherOptions& options) override {
    check_multiple("all_gather", "output", output, "input", input);
    return all_gather(
        c10d::OpType::_ALLGATHER_BASE, output, input, {output}, options);
  }

  WorkPtr allgather_coalesced(
      std::vector<Tensors>& outputs, Tensors& inputs,
      const c10d::AllgatherOptions& options) override {
    // outputs[rank][i] is slice `rank` of output i of
    // allgather_into_tensor_coalesced.
    if (static_cast<int>(outputs.size()) != size_) {
      refuse("all_gather", "{} lists for {} ranks", outputs.size(), size_);
    }
    check_coalesced("all_gather", inputs);
    const auto input = flatten(inputs);
    const auto output = at::empty({size_, input.numel()}, input.options());
    Tensors results;
    for (const auto& list : outputs) {
      check_list("all_gather", list, static_cast<int>(inputs.size()));
      for (size_t i = 0; i < list.size(); ++i) {
        check_equal("all_gather", list[i], inputs[i]);
        results.push_back(list[i]);
      }
    }
    return all_gather(
        c10d::OpType::ALLGATHER_COALESCED, output, input, results, options,
        [outputs, output] {
          for (size_t j = 0; j < outputs.size(); ++j) {
            unflatten(output[j], outputs[j]);
          }
        });
  }

  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs,
      const c10d::AllgatherOptions& options) override {
    check_list("all_gather", outputs, static_cast<int>(inputs.size()));
    if (inputs.size() == 1) {
      return _allgather_base(outputs[0], inputs[0], options);
    }
    check_coalesced("all_gather", inputs);
    std::vector<Tensors> slices(size_);
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (outputs[i].numel() != inputs[i].numel() * size_ ||
          !outputs[i].is_contiguous()) {
        refuse(
            "all_gather",
            "output {} for input {} on {} ranks; it must be "
            "contiguous and that many times as large",
            text(outputs[i]), text(inputs[i]), size_);
      }
      auto rows = outputs[i].view({size_, inputs[i].numel()});
      for (int j = 0; j < size_; ++j) {
        slices[j].push_back(rows[j]);
      }
    }
    return allgather_coalesced(slices, inputs, options);
  }

  WorkPtr gather(
      std::vector<Tensors>& outputs, Tensors& inputs,
      const c10d::GatherOptions& options) override {
    auto& input = only("gather", inputs);
    const int root = checked_root("gather", options);
    const auto shape = shape_of("gather", input);
    std::vector<Staged> staged;
    std::vector<char*> data;
    Tensors results;
    if (rank_ == root) {
      if (outputs.size() != 1) {
        refuse("gather", "one list of outputs on the root");
      }
      check_list("gather", outputs[0], size_);
      results = outputs[0];
      data = stage_list<char>("gather", results, input, Use::output, staged);
    }
    auto in = stage(input, Use::input);
    staged.push_back(in);
    return issue(
        c10d::OpType::GATHER, results, staged, options, [&](Issue how) {
          return group_->gather(in.data(), data, shape, root, std::move(how));
        });
  }

  WorkPtr scatter(
      Tensors& outputs, std::vector<Tensors>& inputs,
      const c10d::ScatterOptions& options) override {
    auto& output = only("scatter", outputs);
    const int root = checked_root("scatter", options);
    const auto shape = shape_of("scatter", output);
    std::vector<Staged> staged;
    std::vector<const char*> data;
    if (rank_ == root) {
      if (inputs.size() != 1) {
        refuse("scatter", "one list of inputs on the root");
      }
      check_list("scatter", inputs[0], size_);
      data = stage_list<const char>(
          "scatter", inputs[0], output, Use::input, staged);
    }
    auto out = stage(output, Use::output);
    staged.push_back(out);
    return issue(
        c10d::OpType::SCATTER, {output}, staged, options, [&](Issue how) {
          return group_->scatter(data, out.data(), shape, root, std::move(how));
        });
  }

  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs,
      const c10d::ReduceScatterOptions& options) override {
    auto& output = only("reduce_scatter", outputs);
    check_list("reduce_scatter", inputs.at(0), size_);
    const auto shape = shape_of("reduce_scatter", output);
    const auto op = reduction_of("reduce_scatter", options.reduceOp, output);
    std::vector<Staged> staged;
    const auto data = stage_list<const char>(
        "reduce_scatter", inputs[0], output, Use::input, staged);
    auto out = stage(output, Use::output);
    staged.push_back(out);
    return issue(
        c10d::OpType::REDUCE_SCATTER, {output}, staged, options,
        [&](Issue how) {
          return group_->reduce_scatter(
              data, out.data(), shape, op, std::move(how));
        });
  }

  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override {
    check_multiple("reduce_scatter", "input", input, "output", output);
    return reduce_scatter(output, input, {output}, options);
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs,
      const c10d::ReduceScatterOptions& options) override {
    check_list("reduce_scatter", inputs, static_cast<int>(outputs.size()));
    if (inputs.size() == 1) {
      return _reduce_scatter_base(outputs[0], inputs[0], options);
    }
    check_coalesced("reduce_scatter", outputs);
    check_coalesced("reduce_scatter", inputs);
    Tensors rows;
    int64_t total = 0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].numel() != outputs[i].numel() * size_) {
        refuse(
            "reduce_scatter", "input {} for output {} on {} ranks",
            text(inputs[i]), text(outputs[i]), size_);
      }
      rows.push_back(inputs[i].reshape({size_, outputs[i].numel()}));
      total += outputs[i].numel();
    }
    const auto input = at::cat(rows, 1);
    const auto output = at::empty({total}, input.options());
    return reduce_scatter(output, input, outputs, options, [outputs, output] {
      unflatten(output, outputs);
    });
  }

  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input,
      std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override {
    check_dtypes(output, input);
    const auto dtype = dtype_of("all_to_all", input);
    auto in = stage(input, Use::input);
    auto out = stage(output, Use::output);
    auto inputs = slices("input", input, input_splits, in.data(), size_);
    auto outputs = slices("output", output, output_splits, out.data(), size_);
    return issue(
        c10d::OpType::ALLTOALL_BASE, {output}, {in, out}, options,
        [&](Issue how) {
          return group_->all_to_all(inputs, outputs, dtype, std::move(how));
        });
  }

  WorkPtr alltoall(
      Tensors& outputs, Tensors& inputs,
      const c10d::AllToAllOptions& options) override {
    check_list("all_to_all", inputs, size_);
    check_list("all_to_all", outputs, size_);
    check_coalesced("all_to_all", inputs);
    check_coalesced("all_to_all", outputs);
    const auto dtype = dtype_of("all_to_all", inputs[0]);
    check_dtypes(outputs[0], inputs[0]);
    std::vector<Staged> staged;
    const auto pieces = [&](const Tensors& tensors, Use use) {
      std::vector<Piece> pieces;
      for (const auto& t : tensors) {
        staged.push_back(stage(t, use));
        pieces.push_back(
            {staged.back().data(), static_cast<uint64_t>(t.numel())});
      }
      return pieces;
    };
    const auto in = pieces(inputs, Use::input);
    const auto out = pieces(outputs, Use::output);
    return issue(
        c10d::OpType::ALLTOALL, outputs, staged, options, [&](Issue how) {
          return group_->all_to_all(in, out, dtype, std::move(how));
        });
  }

  WorkPtr send(Tensors& tensors, int destination, int tag) override {
    auto& tensor = only("send", tensors);
    check_rank("send", "destination", destination);
    const auto shape = shape_of("send", tensor);
    auto staged = stage(tensor, Use::input);
    return issue(
        c10d::OpType::SEND, {tensor}, {staged}, Message(), [&](Issue how) {
          return group_->send(
              staged.data(), shape, destination, tag, std::move(how));
        });
  }

  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    check_rank("recv", "source", source);
    return receive(c10d::OpType::RECV, tensors, source, tag);
  }

  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return receive(c10d::OpType::RECVANYSOURCE, tensors, -1, tag);
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return issue(c10d::OpType::BARRIER, {}, {}, options, [&](Issue how) {
      return group_->barrier(std::move(how));
    });
  }

  // The error names all missing ranks, whatever `wait_all_ranks`.
  void monitoredBarrier(
      const c10d::BarrierOptions& options, bool wait_all_ranks) override {
    barrier(options)->wait(kNoTimeout);
  }

 private:
  using Call = std::function<OperationPtr(Issue)>;

  // The options of a send or receive.
  struct Message {
    bool asyncOp = true;
    std::chrono::milliseconds timeout{0};  // the group's
  };

  // `finish` runs once the results are in host memory and copied back.
  template <class Options>
  WorkPtr issue(
      c10d::OpType type, Tensors results, std::vector<Staged> staged,
      const Options& options, const Call& call,
      std::function<void()> finish = nullptr) {
    auto work = c10::make_intrusive<LocalWork>(rank_, type, std::move(results));
    const auto stream = current_stream(staged);
    Issue how;
    how.async = options.asyncOp;
    how.timeout = std::max(options.timeout, std::chrono::milliseconds(0));
    pending_->fetch_add(1);
    // Keeps the work and its tensors until the operation is over.
    how.on_done = [work, stream, pending = pending_, staged = std::move(staged),
                   finish = std::move(finish)](Operation& operation) {
      auto error = operation.error();
      if (error == nullptr) {
        try {
          copy_back(staged, stream);
          if (finish) {
            finish();
          }
        } catch (...) {
          error = std::current_exception();
        }
      }
      work->end(error);
      pending->fetch_sub(1);
      work->notify();
    };
    work->add(call(std::move(how)));
    if (coalescing_) {
      coalesced_.push_back(work);
    }
    return work;
  }

  WorkPtr all_reduce(
      c10d::OpType type, const at::Tensor& tensor, const Tensors& results,
      const c10d::AllreduceOptions& options,
      std::function<void()> finish = nullptr) {
    const auto shape = shape_of("all_reduce", tensor);
    const auto op = reduction_of("all_reduce", options.reduceOp, tensor);
    auto staged = stage(tensor, Use::both);
    return issue(
        type, results, {staged}, options,
        [&](Issue how) {
          return group_->all_reduce(staged.data(), shape, op, std::move(how));
        },
        std::move(finish));
  }

  // output [size * numel(input)]
  WorkPtr all_gather(
      c10d::OpType type, const at::Tensor& output, const at::Tensor& input,
      const Tensors& results, const c10d::AllgatherOptions& options,
      std::function<void()> finish = nullptr) {
    const auto shape = shape_of("all_gather", input);
    auto out = stage(output, Use::output);
    auto in = stage(input, Use::input);
    return issue(
        type, results, {out, in}, options,
        [&](Issue how) {
          return group_->all_gather(
              in.data(), rows<char>(out.data(), size_, shape.bytes()), shape,
              std::move(how));
        },
        std::move(finish));
  }

  // input [size * numel(output)]
  WorkPtr reduce_scatter(
      const at::Tensor& output, const at::Tensor& input, const Tensors& results,
      const c10d::ReduceScatterOptions& options,
      std::function<void()> finish = nullptr) {
    const auto shape = shape_of("reduce_scatter", output);
    const auto op = reduction_of("reduce_scatter", options.reduceOp, output);
    auto in = stage(input, Use::input);
    auto out = stage(output, Use::output);
    return issue(
        c10d::OpType::_REDUCE_SCATTER_BASE, results, {in, out}, options,
        [&](Issue how) {
          return group_->reduce_scatter(
              rows<const char>(in.data(), size_, shape.bytes()), out.data(),
              shape, op, std::move(how));
        },
        std::move(finish));
  }

  WorkPtr receive(c10d::OpType type, Tensors& tensors, int source, int tag) {
    auto& tensor = only("recv", tensors);
    const auto shape = shape_of("recv", tensor);
    auto staged = stage(tensor, Use::output);
    return issue(type, {tensor}, {staged}, Message(), [&](Issue how) {
      return group_->receive(staged.data(), shape, source, tag, std::move(how));
    });
  }

  // Stages tensors that must be like `model`; returns their memory.
  template <class Char>
  std::vector<Char*> stage_list(
      const char* operation, const Tensors& list, const at::Tensor& model,
      Use use, std::vector<Staged>& staged) const {
    std::vector<Char*> data;
    for (const auto& t : list) {
      check_equal(operation, t, model);
      staged.push_back(stage(t, use));
      data.push_back(staged.back().data());
    }
    return data;
  }

  void check_rank(const char* operation, const char* what, int64_t rank) const {
    if (rank < 0 || rank >= size_) {
      refuse(operation, "{} {} of a group of {}", what, rank, size_);
    }
  }
  template <class Options>
  int checked_root(const char* operation, const Options& options) const {
    check_rank(operation, "root", options.rootRank);
    return static_cast<int>(options.rootRank);
  }
  void check_multiple(
      const char* operation, const char* large_name, const at::Tensor& large,
      const char* small_name, const at::Tensor& small) const {
    if (large.numel() != small.numel() * size_ ||
        large.scalar_type() != small.scalar_type()) {
      refuse(
          operation,
          "{} {} for {} {} on {} ranks; it must have {} elements of its "
          "dtype",
          large_name, text(large), small_name, text(small), size_,
          small.numel() * size_);
    }
  }
  static void check_dtypes(const at::Tensor& output, const at::Tensor& input) {
    if (output.scalar_type() != input.scalar_type()) {
      refuse("all_to_all", "input {}, output {}", text(input), text(output));
    }
  }

  std::shared_ptr<Communicator> group_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<std::atomic<int>> pending_;
  bool coalescing_ = false;
  std::vector<c10::intrusive_ptr<LocalWork>> coalesced_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(
    std::shared_ptr<Host> host, const std::vector<int>& ranks,
    const std::string& group_name, std::chrono::milliseconds timeout) {
  auto group =
      Communicator::create(std::move(host), ranks, group_name, timeout);
  return c10::make_intrusive<LocalBackend>(std::move(group), timeout);
}

}  // namespace echelon::local
