#include "echelon/comm/local/backend.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <thread>

#include "echelon/comm/local/local.h"
#include "echelon/comm/local/work.h"
#include "echelon/comm/shared_memory/failure.h"

namespace echelon::local {
namespace {

using Tensors = LocalBackend::Tensors;

// That shutdown() leaves to threads that carry operations, or that wait for
// one.
constexpr std::chrono::seconds kLongestEnd{1};

[[noreturn]] void refuse(const char* operation, const std::string& why) {
  throw ConfigError(std::string("[local] ") + operation + ": " + why);
}

Dtype dtype_of(const char* operation, const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return Dtype::float32;
    case at::kDouble:
      return Dtype::float64;
    case at::kBFloat16:
      return Dtype::bfloat16;
    case at::kHalf:
      return Dtype::float16;
    case at::kChar:
      return Dtype::int8;
    case at::kByte:
      return Dtype::uint8;
    case at::kShort:
      return Dtype::int16;
    case at::kInt:
      return Dtype::int32;
    case at::kLong:
      return Dtype::int64;
    case at::kBool:
      return Dtype::boolean;
    default:
      refuse(
          operation,
          std::string("a tensor of ") + c10::toString(tensor.scalar_type()) +
              "; float32, float64, bfloat16, float16, int8, uint8, int16, "
              "int32, int64 and bool are possible");
  }
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

std::string text(const at::Tensor& tensor) {
  return c10::str(
      tensor.scalar_type() == at::kBool ? "bool"
                                        : c10::toString(tensor.scalar_type()),
      " ", tensor.sizes());
}

at::Tensor& only(const char* operation, Tensors& tensors) {
  if (tensors.size() != 1) {
    refuse(
        operation,
        "one tensor per rank, not " + std::to_string(tensors.size()));
  }
  return tensors[0];
}

at::Tensor host_memory_like(const at::Tensor& tensor) {
  return at::empty(
      tensor.sizes(), tensor.options()
                          .device(at::kCPU)
                          .memory_format(at::MemoryFormat::Contiguous)
                          .pinned_memory(tensor.is_cuda()));
}

enum class Use { input, output, both };

// Tensors that peers cannot use where they are pass through host memory: other
// devices, and strided ones.
Staged stage(const at::Tensor& tensor, Use use) {
  if (tensor.is_cpu() && tensor.is_contiguous()) {
    return {tensor, tensor, false};
  }
  Staged staged{tensor, host_memory_like(tensor), use != Use::input};
  if (use != Use::output) {
    staged.host.copy_(tensor);
  }
  return staged;
}

void check_equal(
    const char* operation, const at::Tensor& tensor, const at::Tensor& model) {
  if (tensor.numel() != model.numel() ||
      tensor.scalar_type() != model.scalar_type()) {
    refuse(
        operation, "tensors must be alike, but there are " + text(model) +
                       " and " + text(tensor));
  }
}

void check_list(const char* operation, const Tensors& list, int size) {
  if (static_cast<int>(list.size()) != size) {
    refuse(
        operation, std::to_string(list.size()) + " tensors for " +
                       std::to_string(size) + " ranks");
  }
}

// The stream that the caller's work on the device is in, so that copies back
// are ordered with it.
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

Tensors flat_views(const Tensors& tensors) {
  Tensors views;
  for (const auto& t : tensors) {
    views.push_back(t.reshape({-1}));
  }
  return views;
}

// One kind for all; returns the sum of their elements.
int64_t check_coalesced(const char* operation, const Tensors& tensors) {
  if (tensors.empty()) {
    refuse(operation, "an empty list of tensors");
  }
  int64_t total = 0;
  for (const auto& t : tensors) {
    if (t.scalar_type() != tensors[0].scalar_type() ||
        t.device() != tensors[0].device()) {
      refuse(
          operation,
          "one dtype and one device for all tensors, but there are " +
              text(tensors[0]) + " and " + text(t));
    }
    total += t.numel();
  }
  return total;
}

}  // namespace

LocalBackend::LocalBackend(
    std::shared_ptr<Communicator> group, std::chrono::milliseconds timeout)
    : Backend(group->rank(), group->size()),
      group_(std::move(group)),
      timeout_(timeout),
      pending_(std::make_shared<std::atomic<int>>(0)) {}

LocalBackend::~LocalBackend() {
  if (pending_->load() > 0) {
    group_->hurry();
  }
}

LocalBackend::WorkPtr LocalBackend::issue(
    c10d::OpType type, Tensors results, std::vector<Staged> staged, bool async,
    std::chrono::milliseconds timeout,
    const std::function<OperationPtr(Issue)>& call,
    std::function<void()> finish) {
  auto work = c10::make_intrusive<LocalWork>(rank_, type, std::move(results));
  const auto stream = current_stream(staged);
  Issue how;
  how.async = async;
  how.timeout = std::max(timeout, std::chrono::milliseconds(0));
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
    work->tell();
  };
  work->add(call(std::move(how)));
  if (coalescing_) {
    coalesced_.push_back(work);
  }
  return work;
}

void LocalBackend::check_rank(
    const char* operation, const char* what, int64_t rank) const {
  if (rank < 0 || rank >= size_) {
    refuse(
        operation, std::string(what) + " " + std::to_string(rank) +
                       " of a group of " + std::to_string(size_));
  }
}

void LocalBackend::setTimeout(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
  group_->set_timeout(timeout);
}

c10::intrusive_ptr<c10d::Backend::Options> LocalBackend::getBackendOptions() {
  return c10::make_intrusive<Options>("local", timeout_);
}

void LocalBackend::startCoalescing() {
  coalescing_ = true;
  coalesced_.clear();
}

LocalBackend::WorkPtr LocalBackend::endCoalescing() {
  coalescing_ = false;
  Tensors results;
  for (const auto& work : coalesced_) {
    for (auto& t : work->result()) {
      results.push_back(t);
    }
  }
  auto all = c10::make_intrusive<LocalWork>(
      rank_, c10d::OpType::COALESCED, std::move(results));
  struct Progress {
    std::atomic<size_t> left;
    std::mutex mutex;
    std::exception_ptr error;
  };
  auto progress = std::make_shared<Progress>();
  progress->left = coalesced_.size() + 1;
  const auto one_done = [all, progress](std::exception_ptr error) {
    {
      std::lock_guard lock(progress->mutex);
      if (progress->error == nullptr) {
        progress->error = error;
      }
    }
    if (progress->left.fetch_sub(1) == 1) {
      all->end(progress->error);
      all->tell();
    }
  };
  auto works = std::move(coalesced_);
  coalesced_.clear();
  for (const auto& work : works) {
    for (const auto& operation : work->operations()) {
      all->add(operation);
    }
  }
  for (const auto& work : works) {
    work->on_end(one_done);
  }
  one_done(nullptr);
  return all;
}

LocalBackend::WorkPtr LocalBackend::broadcast(
    Tensors& tensors, const c10d::BroadcastOptions& options) {
  auto& tensor = only("broadcast", tensors);
  check_rank("broadcast", "root", options.rootRank);
  const int root = static_cast<int>(options.rootRank);
  const auto shape = shape_of("broadcast", tensor);
  auto staged = stage(tensor, rank_ == root ? Use::input : Use::output);
  return issue(
      c10d::OpType::BROADCAST, {tensor}, {staged}, options.asyncOp,
      options.timeout, [&](Issue how) {
        return group_->broadcast(staged.data(), shape, root, std::move(how));
      });
}

LocalBackend::WorkPtr LocalBackend::allreduce(
    Tensors& tensors, const c10d::AllreduceOptions& options) {
  auto& tensor = only("all_reduce", tensors);
  const auto shape = shape_of("all_reduce", tensor);
  const auto op = reduction_of("all_reduce", options.reduceOp, tensor);
  auto staged = stage(tensor, Use::both);
  return issue(
      c10d::OpType::ALLREDUCE, {tensor}, {staged}, options.asyncOp,
      options.timeout, [&](Issue how) {
        return group_->all_reduce(staged.data(), shape, op, std::move(how));
      });
}

LocalBackend::WorkPtr LocalBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  check_coalesced("all_reduce", tensors);
  if (tensors.size() == 1) {
    return allreduce(tensors, options);
  }
  const auto op = reduction_of("all_reduce", options.reduceOp, tensors[0]);
  auto flat = at::cat(flat_views(tensors));
  const auto shape = shape_of("all_reduce", flat);
  auto staged = stage(flat, Use::both);
  return issue(
      c10d::OpType::ALLREDUCE_COALESCED, tensors, {staged}, options.asyncOp,
      options.timeout,
      [&](Issue how) {
        return group_->all_reduce(staged.data(), shape, op, std::move(how));
      },
      [tensors, flat] {
        int64_t at = 0;
        for (const auto& t : tensors) {
          t.copy_(flat.narrow(0, at, t.numel()).view(t.sizes()));
          at += t.numel();
        }
      });
}

LocalBackend::WorkPtr
LocalBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  auto& tensor = only("reduce", tensors);
  check_rank("reduce", "root", options.rootRank);
  const int root = static_cast<int>(options.rootRank);
  const auto shape = shape_of("reduce", tensor);
  const auto op = reduction_of("reduce", options.reduceOp, tensor);
  auto staged = stage(tensor, rank_ == root ? Use::both : Use::input);
  return issue(
      c10d::OpType::REDUCE, {tensor}, {staged}, options.asyncOp,
      options.timeout, [&](Issue how) {
        return group_->reduce(staged.data(), shape, op, root, std::move(how));
      });
}

LocalBackend::WorkPtr LocalBackend::allgather(
    std::vector<Tensors>& outputs, Tensors& inputs,
    const c10d::AllgatherOptions& options) {
  auto& input = only("all_gather", inputs);
  check_list("all_gather", outputs.at(0), size_);
  const auto shape = shape_of("all_gather", input);
  std::vector<Staged> staged;
  std::vector<char*> data;
  for (const auto& t : outputs[0]) {
    check_equal("all_gather", t, input);
    staged.push_back(stage(t, Use::output));
    data.push_back(staged.back().data());
  }
  auto in = stage(input, Use::input);
  staged.push_back(in);
  return issue(
      c10d::OpType::ALLGATHER, outputs[0], staged, options.asyncOp,
      options.timeout, [&](Issue how) {
        return group_->all_gather(in.data(), data, shape, std::move(how));
      });
}

LocalBackend::WorkPtr LocalBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input,
    const c10d::AllgatherOptions& options) {
  if (output.numel() != input.numel() * size_ ||
      output.scalar_type() != input.scalar_type()) {
    refuse(
        "all_gather",
        "output " + text(output) + " for input " + text(input) + " on " +
            std::to_string(size_) + " ranks; it must have " +
            std::to_string(input.numel() * size_) + " elements of its dtype");
  }
  const auto shape = shape_of("all_gather", input);
  auto out = stage(output, Use::output);
  auto in = stage(input, Use::input);
  std::vector<char*> data;
  for (int j = 0; j < size_; ++j) {
    data.push_back(out.data() + j * shape.bytes());
  }
  return issue(
      c10d::OpType::_ALLGATHER_BASE, {output}, {out, in}, options.asyncOp,
      options.timeout, [&](Issue how) {
        return group_->all_gather(in.data(), data, shape, std::move(how));
      });
}

LocalBackend::WorkPtr LocalBackend::allgather_coalesced(
    std::vector<Tensors>& outputs, Tensors& inputs,
    const c10d::AllgatherOptions& options) {
  // outputs[rank][i] is what _coalesced wants as slice `rank` of output i.
  if (static_cast<int>(outputs.size()) != size_) {
    refuse(
        "all_gather", std::to_string(outputs.size()) + " lists for " +
                          std::to_string(size_) + " ranks");
  }
  const int64_t total = check_coalesced("all_gather", inputs);
  auto flat_in = at::cat(flat_views(inputs));
  auto flat_out = at::empty({size_, total}, flat_in.options());
  Tensors results;
  for (const auto& list : outputs) {
    check_list("all_gather", list, static_cast<int>(inputs.size()));
    for (size_t i = 0; i < list.size(); ++i) {
      check_equal("all_gather", list[i], inputs[i]);
      results.push_back(list[i]);
    }
  }
  const auto shape = shape_of("all_gather", flat_in);
  auto out = stage(flat_out, Use::output);
  auto in = stage(flat_in, Use::input);
  std::vector<char*> data;
  for (int j = 0; j < size_; ++j) {
    data.push_back(out.data() + j * shape.bytes());
  }
  return issue(
      c10d::OpType::ALLGATHER_COALESCED, results, {out, in}, options.asyncOp,
      options.timeout,
      [&](Issue how) {
        return group_->all_gather(in.data(), data, shape, std::move(how));
      },
      [outputs, flat_out] {
        for (size_t j = 0; j < outputs.size(); ++j) {
          int64_t at = 0;
          for (const auto& t : outputs[j]) {
            t.copy_(flat_out[j].narrow(0, at, t.numel()).view(t.sizes()));
            at += t.numel();
          }
        }
      });
}

LocalBackend::WorkPtr LocalBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
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
          "output " + text(outputs[i]) + " for input " + text(inputs[i]) +
              " on " + std::to_string(size_) +
              " ranks; it must be contiguous and that many times as large");
    }
    auto rows = outputs[i].view({size_, inputs[i].numel()});
    for (int j = 0; j < size_; ++j) {
      slices[j].push_back(rows[j]);
    }
  }
  return allgather_coalesced(slices, inputs, options);
}

LocalBackend::WorkPtr LocalBackend::gather(
    std::vector<Tensors>& outputs, Tensors& inputs,
    const c10d::GatherOptions& options) {
  auto& input = only("gather", inputs);
  check_rank("gather", "root", options.rootRank);
  const int root = static_cast<int>(options.rootRank);
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
    for (const auto& t : results) {
      check_equal("gather", t, input);
      staged.push_back(stage(t, Use::output));
      data.push_back(staged.back().data());
    }
  }
  auto in = stage(input, Use::input);
  staged.push_back(in);
  return issue(
      c10d::OpType::GATHER, results, staged, options.asyncOp, options.timeout,
      [&](Issue how) {
        return group_->gather(in.data(), data, shape, root, std::move(how));
      });
}

LocalBackend::WorkPtr LocalBackend::scatter(
    Tensors& outputs, std::vector<Tensors>& inputs,
    const c10d::ScatterOptions& options) {
  auto& output = only("scatter", outputs);
  check_rank("scatter", "root", options.rootRank);
  const int root = static_cast<int>(options.rootRank);
  const auto shape = shape_of("scatter", output);
  std::vector<Staged> staged;
  std::vector<const char*> data;
  if (rank_ == root) {
    if (inputs.size() != 1) {
      refuse("scatter", "one list of inputs on the root");
    }
    check_list("scatter", inputs[0], size_);
    for (const auto& t : inputs[0]) {
      check_equal("scatter", t, output);
      staged.push_back(stage(t, Use::input));
      data.push_back(staged.back().data());
    }
  }
  auto out = stage(output, Use::output);
  staged.push_back(out);
  return issue(
      c10d::OpType::SCATTER, {output}, staged, options.asyncOp, options.timeout,
      [&](Issue how) {
        return group_->scatter(data, out.data(), shape, root, std::move(how));
      });
}

LocalBackend::WorkPtr LocalBackend::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs,
    const c10d::ReduceScatterOptions& options) {
  auto& output = only("reduce_scatter", outputs);
  check_list("reduce_scatter", inputs.at(0), size_);
  const auto shape = shape_of("reduce_scatter", output);
  const auto op = reduction_of("reduce_scatter", options.reduceOp, output);
  std::vector<Staged> staged;
  std::vector<const char*> data;
  for (const auto& t : inputs[0]) {
    check_equal("reduce_scatter", t, output);
    staged.push_back(stage(t, Use::input));
    data.push_back(staged.back().data());
  }
  auto out = stage(output, Use::output);
  staged.push_back(out);
  return issue(
      c10d::OpType::REDUCE_SCATTER, {output}, staged, options.asyncOp,
      options.timeout, [&](Issue how) {
        return group_->reduce_scatter(
            data, out.data(), shape, op, std::move(how));
      });
}

LocalBackend::WorkPtr LocalBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input,
    const c10d::ReduceScatterOptions& options) {
  if (input.numel() != output.numel() * size_ ||
      output.scalar_type() != input.scalar_type()) {
    refuse(
        "reduce_scatter",
        "input " + text(input) + " for output " + text(output) + " on " +
            std::to_string(size_) + " ranks; it must have " +
            std::to_string(output.numel() * size_) + " elements of its dtype");
  }
  const auto shape = shape_of("reduce_scatter", output);
  const auto op = reduction_of("reduce_scatter", options.reduceOp, output);
  auto in = stage(input, Use::input);
  auto out = stage(output, Use::output);
  std::vector<const char*> data;
  for (int j = 0; j < size_; ++j) {
    data.push_back(in.data() + j * shape.bytes());
  }
  return issue(
      c10d::OpType::_REDUCE_SCATTER_BASE, {output}, {in, out}, options.asyncOp,
      options.timeout, [&](Issue how) {
        return group_->reduce_scatter(
            data, out.data(), shape, op, std::move(how));
      });
}

LocalBackend::WorkPtr LocalBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs,
    const c10d::ReduceScatterOptions& options) {
  check_list("reduce_scatter", inputs, static_cast<int>(outputs.size()));
  if (inputs.size() == 1) {
    return _reduce_scatter_base(outputs[0], inputs[0], options);
  }
  const int64_t total = check_coalesced("reduce_scatter", outputs);
  check_coalesced("reduce_scatter", inputs);
  Tensors rows;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].numel() != outputs[i].numel() * size_) {
      refuse(
          "reduce_scatter", "input " + text(inputs[i]) + " for output " +
                                text(outputs[i]) + " on " +
                                std::to_string(size_) + " ranks");
    }
    rows.push_back(inputs[i].reshape({size_, outputs[i].numel()}));
  }
  auto flat_in = at::cat(rows, 1);
  auto flat_out = at::empty({total}, flat_in.options());
  const auto shape = shape_of("reduce_scatter", flat_out);
  const auto op = reduction_of("reduce_scatter", options.reduceOp, flat_out);
  auto in = stage(flat_in, Use::input);
  auto out = stage(flat_out, Use::output);
  std::vector<const char*> data;
  for (int j = 0; j < size_; ++j) {
    data.push_back(in.data() + j * shape.bytes());
  }
  return issue(
      c10d::OpType::_REDUCE_SCATTER_BASE, outputs, {in, out}, options.asyncOp,
      options.timeout,
      [&](Issue how) {
        return group_->reduce_scatter(
            data, out.data(), shape, op, std::move(how));
      },
      [outputs, flat_out] {
        int64_t at = 0;
        for (const auto& t : outputs) {
          t.copy_(flat_out.narrow(0, at, t.numel()).view(t.sizes()));
          at += t.numel();
        }
      });
}

namespace {

// Slices along dim 0, equal or as given, as pieces of the memory at `data`.
std::vector<Piece> slices(
    const char* what, const at::Tensor& tensor,
    const std::vector<int64_t>& splits, char* data, int size) {
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const int64_t row = rows == 0 ? 0 : tensor.numel() / rows;
  std::vector<int64_t> counts = splits;
  if (counts.empty()) {
    if (rows % size != 0) {
      refuse(
          "all_to_all", std::string(what) + " " + text(tensor) +
                            ": dim 0 must divide by " + std::to_string(size) +
                            " ranks, or give the splits");
    }
    counts.assign(size, rows / size);
  }
  const int64_t sum = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  if (static_cast<int>(counts.size()) != size || sum != rows ||
      *std::min_element(counts.begin(), counts.end()) < 0) {
    refuse(
        "all_to_all",
        c10::str(
            what, " splits [", c10::Join(", ", counts), "] of ", text(tensor),
            ": there must be one per rank, not negative, and their sum ",
            rows));
  }
  std::vector<Piece> pieces;
  for (const int64_t count : counts) {
    pieces.push_back({data, static_cast<uint64_t>(count * row)});
    data += count * row * tensor.element_size();
  }
  return pieces;
}

}  // namespace

LocalBackend::WorkPtr LocalBackend::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  if (output.scalar_type() != input.scalar_type()) {
    refuse("all_to_all", "input " + text(input) + ", output " + text(output));
  }
  const auto dtype = dtype_of("all_to_all", input);
  auto in = stage(input, Use::input);
  auto out = stage(output, Use::output);
  auto inputs = slices("input", input, input_splits, in.data(), size_);
  auto outputs = slices("output", output, output_splits, out.data(), size_);
  return issue(
      c10d::OpType::ALLTOALL_BASE, {output}, {in, out}, options.asyncOp,
      options.timeout, [&](Issue how) {
        return group_->all_to_all(inputs, outputs, dtype, std::move(how));
      });
}

LocalBackend::WorkPtr LocalBackend::alltoall(
    Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  check_list("all_to_all", inputs, size_);
  check_list("all_to_all", outputs, size_);
  check_coalesced("all_to_all", inputs);
  check_coalesced("all_to_all", outputs);
  const auto dtype = dtype_of("all_to_all", inputs[0]);
  if (outputs[0].scalar_type() != inputs[0].scalar_type()) {
    refuse(
        "all_to_all",
        "input " + text(inputs[0]) + ", output " + text(outputs[0]));
  }
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
  auto in = pieces(inputs, Use::input);
  auto out = pieces(outputs, Use::output);
  return issue(
      c10d::OpType::ALLTOALL, outputs, staged, options.asyncOp, options.timeout,
      [&](Issue how) {
        return group_->all_to_all(in, out, dtype, std::move(how));
      });
}

LocalBackend::WorkPtr
LocalBackend::send(Tensors& tensors, int destination, int tag) {
  auto& tensor = only("send", tensors);
  check_rank("send", "destination", destination);
  const auto shape = shape_of("send", tensor);
  auto staged = stage(tensor, Use::input);
  return issue(
      c10d::OpType::SEND, {tensor}, {staged}, true, {}, [&](Issue how) {
        return group_->send(
            staged.data(), shape, destination, tag, std::move(how));
      });
}

LocalBackend::WorkPtr
LocalBackend::recv(Tensors& tensors, int source, int tag) {
  auto& tensor = only("recv", tensors);
  check_rank("recv", "source", source);
  const auto shape = shape_of("recv", tensor);
  auto staged = stage(tensor, Use::output);
  return issue(
      c10d::OpType::RECV, {tensor}, {staged}, true, {}, [&](Issue how) {
        return group_->receive(
            staged.data(), shape, source, tag, std::move(how));
      });
}

LocalBackend::WorkPtr LocalBackend::recvAnysource(Tensors& tensors, int tag) {
  auto& tensor = only("recv", tensors);
  const auto shape = shape_of("recv", tensor);
  auto staged = stage(tensor, Use::output);
  return issue(
      c10d::OpType::RECVANYSOURCE, {tensor}, {staged}, true, {},
      [&](Issue how) {
        return group_->receive(staged.data(), shape, -1, tag, std::move(how));
      });
}

LocalBackend::WorkPtr
LocalBackend::barrier(const c10d::BarrierOptions& options) {
  return issue(
      c10d::OpType::BARRIER, {}, {}, options.asyncOp, options.timeout,
      [&](Issue how) { return group_->barrier(std::move(how)); });
}

void LocalBackend::monitoredBarrier(
    const c10d::BarrierOptions& options, bool wait_all_ranks) {
  // The error names all missing ranks either way.
  barrier(options)->wait(kNoTimeout);
}

uint64_t LocalBackend::getSequenceNumberForGroup() {
  return group_->sequence();
}

c10::intrusive_ptr<c10d::Backend> LocalBackend::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<Options>& options) {
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

c10d::ErrorType LocalBackend::getError() {
  return group_->failed() ? c10d::ErrorType::COMM_ERROR
                          : c10d::ErrorType::SUCCESS;
}

void LocalBackend::abort() {
  group_->abort("abort() was called");
}

void LocalBackend::shutdown() {
  // What has arrived ends, though nobody waited for it; other threads may be at
  // it.
  const auto end = std::chrono::steady_clock::now() + kLongestEnd;
  while (pending_->load() > 0 && group_->carry_on() < pending_->load() &&
         std::chrono::steady_clock::now() < end) {
    std::this_thread::yield();
  }
  if (pending_->load() > 0) {
    group_->abort("shutdown() was called while operations were pending");
  }
}

c10::intrusive_ptr<c10d::Backend> make_backend(
    std::shared_ptr<Host> host, const std::vector<int>& ranks,
    const std::string& group_name, std::chrono::milliseconds timeout) {
  auto group =
      Communicator::create(std::move(host), ranks, group_name, timeout);
  return c10::make_intrusive<LocalBackend>(std::move(group), timeout);
}

}  // namespace echelon::local
