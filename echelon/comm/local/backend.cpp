// c10d's interface to a Communicator: stages the tensors of a call, issues the
// operation, and hands out the work that completes with it. It has the calls
// that Group makes, with the arguments that Group has checked.
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

#include "echelon/comm/local/local.h"
#include "echelon/comm/shared_memory/communicator.h"
#include "echelon/comm/trace/record.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::local {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

[[noreturn]] void refuse(const char* operation, const std::string& why) {
  throw ConfigError(format("[local] {}: {}", operation, why));
}

Dtype dtype_of(const char* operation, const at::Tensor& tensor) {
  static constexpr std::pair<at::ScalarType, Dtype> dtypes[] = {
      {at::kFloat, Dtype::float32},     {at::kDouble, Dtype::float64},
      {at::kBFloat16, Dtype::bfloat16}, {at::kHalf, Dtype::float16},
      {at::kChar, Dtype::int8},         {at::kByte, Dtype::uint8},
      {at::kShort, Dtype::int16},       {at::kInt, Dtype::int32},
      {at::kLong, Dtype::int64},        {at::kBool, Dtype::boolean}};
  for (const auto& [theirs, ours] : dtypes) {
    if (theirs == tensor.scalar_type()) return ours;
  }
  refuse(
      operation, format(
                     "a tensor of {}; float32, float64, bfloat16, float16, "
                     "int8, uint8, int16, int32, int64 and bool are possible",
                     c10::toString(tensor.scalar_type())));
}

Shape shape_of(const char* operation, const at::Tensor& tensor) {
  Shape shape;
  shape.dtype = dtype_of(operation, tensor);
  shape.count = static_cast<uint64_t>(tensor.numel());
  shape.num_dims =
      tensor.dim() <= kMaxDims ? static_cast<int>(tensor.dim()) : kMaxDims + 1;
  for (int i = 0; i < shape.num_dims && i < kMaxDims; ++i) {
    shape.dims[i] = tensor.size(i);
  }
  return shape;
}

Reduction reduction_of(
    const char* operation, const c10d::ReduceOp& op, const at::Tensor& tensor) {
  switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
    case c10d::ReduceOp::SUM:
      return Reduction::sum;
    case c10d::ReduceOp::MIN:
      return Reduction::min;
    case c10d::ReduceOp::MAX:
      return Reduction::max;
    case c10d::ReduceOp::AVG:
      if (tensor.scalar_type() == at::kBool) {
        refuse(operation, "no average of bool; use sum, min or max");
      }
      return Reduction::avg;
    default:
      refuse(
          operation, "this reduction is not there; use sum, avg, min or max");
  }
}

// A tensor of a call, and the contiguous host memory that stands for it while
// the operation runs: the tensor itself where that is possible.
struct Staged {
  at::Tensor tensor;
  at::Tensor host;
  bool copy_back = false;

  char* data() const { return static_cast<char*>(host.data_ptr()); }
};

enum class Use { input, output, both };

// Tensors that peers cannot address in place, because they are on another
// device or strided, pass through host memory.
Staged stage(const at::Tensor& tensor, Use use) {
  if (tensor.is_cpu() && tensor.is_contiguous()) {
    return {tensor, tensor, false};
  }
  const auto options = tensor.options()
                           .device(at::kCPU)
                           .memory_format(at::MemoryFormat::Contiguous)
                           .pinned_memory(at::accelerator::isAccelerator(
                               tensor.device().type()));
  Staged staged{tensor, at::empty(tensor.sizes(), options), use != Use::input};
  if (use != Use::output) {
    staged.host.copy_(tensor);
  }
  return staged;
}

// Stages each tensor of `list`; returns their memory.
std::vector<Piece>
stage_list(const Tensors& list, Use use, std::vector<Staged>& staged) {
  std::vector<Piece> pieces;
  for (const auto& tensor : list) {
    staged.push_back(stage(tensor, use));
    pieces.push_back(
        {staged.back().data(), static_cast<uint64_t>(tensor.numel())});
  }
  return pieces;
}

// The stream that the caller's work on the device is in: copies back are
// ordered with it.
std::optional<c10::Stream> current_stream(const std::vector<Staged>& staged) {
  for (const auto& s : staged) {
    if (!s.tensor.is_cpu()) {
      const auto device = s.tensor.device();
      return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    }
  }
  return std::nullopt;
}

void copy_back(
    const std::vector<Staged>& staged,
    const std::optional<c10::Stream>& stream) {
  std::optional<c10::StreamGuard> guard;
  if (stream) {
    guard.emplace(*stream);
  }
  for (const auto& s : staged) {
    if (s.copy_back) {
      s.tensor.copy_(s.host);
    }
  }
}

// All elements of `tensors` in one dimension, one tensor after another.
at::Tensor flatten(const Tensors& tensors) {
  Tensors views;
  for (const auto& t : tensors) {
    views.push_back(t.reshape({-1}));
  }
  return at::cat(views);
}

// The reverse: fills `tensors` from `flat`.
void unflatten(const at::Tensor& flat, const Tensors& tensors) {
  int64_t at = 0;
  for (const auto& t : tensors) {
    t.copy_(flat.narrow(0, at, t.numel()).view(t.sizes()));
    at += t.numel();
  }
}

// `size` rows of one shape, from `data` on.
std::vector<Piece> rows(char* data, int size, const Shape& row) {
  std::vector<Piece> rows;
  for (int j = 0; j < size; ++j) {
    rows.push_back({data + j * row.bytes(), row.count});
  }
  return rows;
}

// Slices along dim 0, equal or as `splits` says, as pieces of the memory at
// `data`.
std::vector<Piece> slices(
    const at::Tensor& tensor, std::vector<int64_t> splits, char* data,
    int size) {
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const int64_t row = rows == 0 ? 0 : tensor.numel() / rows;
  if (splits.empty()) splits.assign(size, rows / size);
  std::vector<Piece> pieces;
  for (const int64_t count : splits) {
    pieces.push_back({data, static_cast<uint64_t>(count * row)});
    data += count * row * tensor.element_size();
  }
  return pieces;
}

class LocalWork : public c10d::Work {
 public:
  explicit LocalWork(int rank)
      : Work(rank),
        future_(
            c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get())) {}

  bool wait(std::chrono::milliseconds timeout) override {
    if (!operation_->wait(timeout)) {
      throw Timeout(
          format(
              "[local] {} #{} is not done after {} ms of wait(); it continues "
              "until its own deadline",
              operation_->name, operation_->sequence, timeout.count()),
          operation_->sequence, {});
    }
    if (auto error = exception()) {
      std::rethrow_exception(error);
    }
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

  // The issuing call makes this one, before anyone else has the work.
  void set_operation(OperationPtr operation) {
    operation_ = std::move(operation);
  }
  // Completes the work: the results are in place, or `error` is set.
  void end(std::exception_ptr error) {
    finish(error);
    if (error != nullptr) {
      future_->setError(error);
    } else {
      future_->markCompleted();
    }
  }

 private:
  OperationPtr operation_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class LocalBackend : public c10d::Backend {
 public:
  explicit LocalBackend(std::shared_ptr<Communicator> group)
      : Backend(group->rank(), group->size()), group_(std::move(group)) {}

  const std::string getBackendName() const override { return "local"; }

  WorkPtr
  broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const auto shape = shape_of("broadcast", tensors[0]);
    const int root = static_cast<int>(options.rootRank);
    auto staged = stage(tensors[0], rank_ == root ? Use::input : Use::output);
    return issue({staged}, options.asyncOp, [&](Issue how) {
      return group_->broadcast(staged.data(), shape, root, std::move(how));
    });
  }

  WorkPtr
  allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return all_reduce(tensors[0], options);
  }

  WorkPtr allreduce_coalesced(
      Tensors& tensors,
      const c10d::AllreduceCoalescedOptions& options) override {
    if (tensors.size() == 1) {
      return allreduce(tensors, options);
    }
    const auto flat = flatten(tensors);
    return all_reduce(
        flat, options, [tensors, flat] { unflatten(flat, tensors); });
  }

  WorkPtr
  reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const auto shape = shape_of("reduce", tensors[0]);
    const auto op = reduction_of("reduce", options.reduceOp, tensors[0]);
    const int root = static_cast<int>(options.rootRank);
    auto staged = stage(tensors[0], rank_ == root ? Use::both : Use::input);
    return issue({staged}, options.asyncOp, [&](Issue how) {
      return group_->reduce(staged.data(), shape, op, root, std::move(how));
    });
  }

  WorkPtr _allgather_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::AllgatherOptions& options) override {
    return all_gather(output, input, options);
  }

  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs,
      const c10d::AllgatherOptions& options) override {
    if (inputs.size() == 1) {
      return _allgather_base(outputs[0], inputs[0], options);
    }
    // slices[j][i] is what rank j has for output i.
    std::vector<Tensors> slices(size_);
    for (size_t i = 0; i < inputs.size(); ++i) {
      const auto rows = outputs[i].view({size_, inputs[i].numel()});
      for (int j = 0; j < size_; ++j) {
        slices[j].push_back(rows[j]);
      }
    }
    const auto input = flatten(inputs);
    const auto output = at::empty({size_, input.numel()}, input.options());
    return all_gather(output, input, options, [slices, output] {
      for (size_t j = 0; j < slices.size(); ++j) {
        unflatten(output[j], slices[j]);
      }
    });
  }

  WorkPtr gather(
      std::vector<Tensors>& outputs, Tensors& inputs,
      const c10d::GatherOptions& options) override {
    const auto shape = shape_of("gather", inputs[0]);
    const int root = static_cast<int>(options.rootRank);
    std::vector<Staged> staged;
    const auto data =
        stage_list(rank_ == root ? outputs[0] : Tensors(), Use::output, staged);
    auto in = stage(inputs[0], Use::input);
    staged.push_back(in);
    return issue(staged, options.asyncOp, [&](Issue how) {
      return group_->gather(in.data(), data, shape, root, std::move(how));
    });
  }

  WorkPtr scatter(
      Tensors& outputs, std::vector<Tensors>& inputs,
      const c10d::ScatterOptions& options) override {
    const auto shape = shape_of("scatter", outputs[0]);
    const int root = static_cast<int>(options.rootRank);
    std::vector<Staged> staged;
    const auto data =
        stage_list(rank_ == root ? inputs[0] : Tensors(), Use::input, staged);
    auto out = stage(outputs[0], Use::output);
    staged.push_back(out);
    return issue(staged, options.asyncOp, [&](Issue how) {
      return group_->scatter(data, out.data(), shape, root, std::move(how));
    });
  }

  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override {
    return reduce_and_scatter(output, input, options);
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs,
      const c10d::ReduceScatterOptions& options) override {
    if (inputs.size() == 1) {
      return _reduce_scatter_base(outputs[0], inputs[0], options);
    }
    Tensors rows;
    int64_t total = 0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      rows.push_back(inputs[i].reshape({size_, outputs[i].numel()}));
      total += outputs[i].numel();
    }
    const auto input = at::cat(rows, 1);
    const auto output = at::empty({total}, input.options());
    return reduce_and_scatter(output, input, options, [outputs, output] {
      unflatten(output, outputs);
    });
  }

  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input,
      std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override {
    const auto dtype = dtype_of("all_to_all", input);
    auto in = stage(input, Use::input);
    auto out = stage(output, Use::output);
    auto inputs = slices(input, input_splits, in.data(), size_);
    auto outputs = slices(output, output_splits, out.data(), size_);
    return issue({in, out}, options.asyncOp, [&](Issue how) {
      return group_->all_to_all(inputs, outputs, dtype, std::move(how));
    });
  }

  WorkPtr send(Tensors& tensors, int destination, int tag) override {
    const auto shape = shape_of("send", tensors[0]);
    auto staged = stage(tensors[0], Use::input);
    return issue({staged}, /*async=*/true, [&](Issue how) {
      return group_->send(
          staged.data(), shape, destination, tag, std::move(how));
    });
  }

  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    const auto shape = shape_of("recv", tensors[0]);
    auto staged = stage(tensors[0], Use::output);
    return issue({staged}, /*async=*/true, [&](Issue how) {
      return group_->receive(staged.data(), shape, source, tag, std::move(how));
    });
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return issue({}, options.asyncOp, [&](Issue how) {
      return group_->barrier(std::move(how));
    });
  }

 private:
  using Finish = std::function<void()>;

  // `finish` runs once the results are in host memory and copied back.
  WorkPtr issue(
      std::vector<Staged> staged, bool async,
      const std::function<OperationPtr(Issue)>& call, Finish finish = nullptr) {
    auto work = c10::make_intrusive<LocalWork>(rank_);
    const auto stream = current_stream(staged);
    Issue how;
    how.label = LabelScope::current();
    how.async = async;
    // Keeps the work and its tensors until the operation is over.
    how.on_done = [work, stream, staged = std::move(staged),
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
    };
    work->set_operation(call(std::move(how)));
    return work;
  }

  WorkPtr all_reduce(
      const at::Tensor& tensor, const c10d::AllreduceOptions& options,
      Finish finish = nullptr) {
    const auto shape = shape_of("all_reduce", tensor);
    const auto op = reduction_of("all_reduce", options.reduceOp, tensor);
    auto staged = stage(tensor, Use::both);
    return issue(
        {staged}, options.asyncOp,
        [&](Issue how) {
          return group_->all_reduce(staged.data(), shape, op, std::move(how));
        },
        std::move(finish));
  }

  // output [size * numel(input)]
  WorkPtr all_gather(
      const at::Tensor& output, const at::Tensor& input,
      const c10d::AllgatherOptions& options, Finish finish = nullptr) {
    const auto shape = shape_of("all_gather", input);
    auto out = stage(output, Use::output);
    auto in = stage(input, Use::input);
    return issue(
        {out, in}, options.asyncOp,
        [&](Issue how) {
          return group_->all_gather(
              in.data(), rows(out.data(), size_, shape), shape, std::move(how));
        },
        std::move(finish));
  }

  // input [size * numel(output)]
  WorkPtr reduce_and_scatter(
      const at::Tensor& output, const at::Tensor& input,
      const c10d::ReduceScatterOptions& options, Finish finish = nullptr) {
    const auto shape = shape_of("reduce_scatter", output);
    const auto op = reduction_of("reduce_scatter", options.reduceOp, output);
    auto in = stage(input, Use::input);
    auto out = stage(output, Use::output);
    return issue(
        {in, out}, options.asyncOp,
        [&](Issue how) {
          return group_->reduce_scatter(
              rows(in.data(), size_, shape), out.data(), shape, op,
              std::move(how));
        },
        std::move(finish));
  }

  std::shared_ptr<Communicator> group_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(
    std::shared_ptr<Host> host, const std::vector<int>& ranks,
    const std::string& group_name, std::chrono::milliseconds timeout) {
  return c10::make_intrusive<LocalBackend>(
      Communicator::create(std::move(host), ranks, group_name, timeout));
}

}  // namespace echelon::local
