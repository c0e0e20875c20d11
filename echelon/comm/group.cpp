// Every call has the same steps: check the arguments, before anything is sent;
// return at once for one rank, a silent group or tensors without values; change
// what the backend does not know (bool, other dtypes, an average) into what it
// does; issue the call; and give Work what is left to do when the call has
// ended.
#include "echelon/comm/group.h"

#include <algorithm>
#include <numeric>

#include "echelon/comm/group_call.h"
#include "echelon/comm/nccl/accelerator.h"
#include "echelon/comm/trace/record.h"
#include "echelon/comm/world.h"

namespace echelon {
namespace {

using c10d::ReduceOp;
using detail::Checks;
using detail::finish;
using detail::label_of;
using detail::movable;
using detail::nothing_sent;
using detail::Reduction;
using detail::WorkPtr;
using torch::Tensor;

std::string shape_of(const Tensor& tensor) {
  return shape_text(tensor.sizes().vec());
}

constexpr auto kNoLimit = std::chrono::milliseconds(0);

std::vector<Tensor>
joined(std::vector<Tensor> list, const std::vector<Tensor>& more) {
  list.insert(list.end(), more.begin(), more.end());
  return list;
}

/// Does what movable() does, with one row per row of `tensor`.
Tensor movable_rows(const Group::Impl& group, const Tensor& tensor) {
  const Tensor bytes = movable(group, tensor);
  if (bytes.is_same(tensor)) return tensor;
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  return bytes.view({rows, rows == 0 ? 0 : bytes.numel() / rows});
}

/// Returns `tensor` in one dimension for a backend that compares the shapes of
/// input and output, which callers choose freely.
Tensor flat(const Group::Impl& group, const Tensor& tensor) {
  return group.kind == BackendKind::gloo ? tensor.view({-1}) : tensor;
}

std::function<void()> divide(const std::vector<Reduction>& reductions) {
  if (reductions.empty() || reductions.front().divide_by == 1) return nullptr;
  return [reductions] {
    for (const auto& reduction : reductions) {
      torch::NoGradGuard no_grad;
      Tensor tensor = reduction.tensor;
      tensor.div_(reduction.divide_by);
    }
  };
}

/// A call of a group of one rank: the outputs are the inputs.
Work copy_alone(
    const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs) {
  torch::NoGradGuard no_grad;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (outputs[i].is_same(inputs[i])) continue;
    outputs[i].view({-1}).copy_(inputs[i].reshape({-1}));
  }
  return {};
}

template <class Options>
Options with_async(const Call& call) {
  Options options;
  options.asyncOp = call.async;
  return options;
}

}  // namespace

// Work ------------------------------------------------------------------------

void Work::wait() const {
  if (!impl_ || impl_->waited) return;
  for (const auto& work : impl_->works) work->wait(kNoLimit);
  impl_->waited = true;
  if (impl_->after) impl_->after();
}

bool Work::done() const {
  if (!impl_ || impl_->waited) return true;
  return std::ranges::all_of(
      impl_->works, [](const auto& work) { return work->isCompleted(); });
}

// Group -----------------------------------------------------------------------

Group Group::alone(const std::string& axis) {
  auto impl = std::make_shared<Impl>();
  impl->axis = axis;
  return Group(std::move(impl));
}

Group Group::silent(const std::string& axis, int rank, int size) {
  auto impl = std::make_shared<Impl>();
  impl->axis = axis;
  impl->rank = rank;
  impl->ranks.resize(static_cast<size_t>(size));
  std::iota(impl->ranks.begin(), impl->ranks.end(), 0);
  return Group(std::move(impl));
}

Group make_group(
    c10::intrusive_ptr<c10d::Backend> backend, const std::string& axis,
    const std::vector<int>& ranks, int rank, BackendKind kind,
    torch::Device device) {
  auto impl = std::make_shared<Group::Impl>();
  impl->rank = rank;
  impl->axis = axis;
  impl->ranks = ranks;
  impl->kind = kind;
  impl->device = device;
  impl->backend = std::move(backend);
  return Group(std::move(impl));
}

int Group::rank() const {
  return impl_->rank;
}
int Group::size() const {
  return static_cast<int>(impl_->ranks.size());
}
const std::string& Group::axis() const {
  return impl_->axis;
}
const std::vector<int>& Group::ranks() const {
  return impl_->ranks;
}

Work Group::all_reduce(
    const std::vector<Tensor>& tensors, echelon::ReduceOp op,
    const Call& call) const {
  const Checks check(*impl_, "all_reduce");
  check.list(tensors);
  std::vector<Reduction> reductions;
  std::vector<Tensor> reduced;
  for (const auto& tensor : tensors) {
    reductions.push_back(check.reduction(tensor, op));
    reduced.push_back(reductions.back().tensor);
  }
  if (size() == 1) return {};
  if (check.no_data(tensors)) return nothing_sent(call);
  const LabelScope label(label_of(call));
  auto options = with_async<c10d::AllreduceCoalescedOptions>(call);
  options.reduceOp = reductions.front().op;
  return finish(
      {tensors.size() == 1
           ? impl_->backend->allreduce(reduced, options)
           : impl_->backend->allreduce_coalesced(reduced, options)},
      call, divide(reductions));
}

Work Group::all_gather(
    const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs,
    const Call& call) const {
  const Checks check(*impl_, "all_gather");
  check.pairs(outputs, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check.numel(outputs[i], inputs[i], inputs[i].numel() * size());
  }
  if (check.no_data(joined(outputs, inputs))) {
    return size() == 1 ? Work() : nothing_sent(call);
  }
  if (size() == 1) return copy_alone(outputs, inputs);
  std::vector<Tensor> to;
  std::vector<Tensor> from;
  for (size_t i = 0; i < inputs.size(); ++i) {
    to.push_back(flat(*impl_, movable(*impl_, outputs[i])));
    from.push_back(flat(*impl_, movable(*impl_, inputs[i])));
  }
  const LabelScope label(label_of(call));
  const auto options = with_async<c10d::AllgatherOptions>(call);
  auto& backend = *impl_->backend;
  return finish(
      {inputs.size() == 1
           ? backend._allgather_base(to[0], from[0], options)
           : backend.allgather_into_tensor_coalesced(to, from, options)},
      call);
}

Work Group::reduce_scatter(
    const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs,
    echelon::ReduceOp op, const Call& call) const {
  const Checks check(*impl_, "reduce_scatter");
  check.pairs(outputs, inputs);
  std::vector<Reduction> results;
  std::vector<Tensor> to;
  std::vector<Tensor> from;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].numel() % size() != 0) {
      check.refuse(
          "input {} does not divide into {} equal slices", shape_of(inputs[i]),
          size());
    }
    check.numel(outputs[i], inputs[i], inputs[i].numel() / size());
    results.push_back(check.reduction(outputs[i], op));
    to.push_back(flat(*impl_, results.back().tensor));
    from.push_back(flat(*impl_, check.reduction(inputs[i], op).tensor));
  }
  if (check.no_data(joined(outputs, inputs))) {
    return size() == 1 ? Work() : nothing_sent(call);
  }
  if (size() == 1) return copy_alone(outputs, inputs);
  const LabelScope label(label_of(call));
  auto options = with_async<c10d::ReduceScatterOptions>(call);
  options.reduceOp = results.front().op;
  auto& backend = *impl_->backend;
  return finish(
      {inputs.size() == 1
           ? backend._reduce_scatter_base(to[0], from[0], options)
           : backend.reduce_scatter_tensor_coalesced(to, from, options)},
      call, divide(results));
}

Work Group::all_to_all(
    const Tensor& output, const Tensor& input,
    const std::vector<int64_t>& output_splits,
    const std::vector<int64_t>& input_splits, const Call& call) const {
  const Checks check(*impl_, "all_to_all");
  check.tensor(input);
  check.tensor(output);
  check.same_dtype(output, input);
  const auto check_splits = [&](const Tensor& tensor,
                                const std::vector<int64_t>& splits,
                                const char* which) {
    const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
    if (splits.empty()) {
      if (rows % size() != 0) {
        check.refuse(
            "{} {} does not divide along dim 0; give the splits", which,
            shape_of(tensor));
      }
      return;
    }
    const int64_t sum =
        std::accumulate(splits.begin(), splits.end(), int64_t{0});
    if (static_cast<int>(splits.size()) != size() || sum != rows ||
        std::ranges::any_of(splits, [](int64_t split) { return split < 0; })) {
      check.refuse(
          "{} splits must be {} numbers, 0 or more, that sum to {}, the "
          "size of dim 0",
          which, size(), rows);
    }
  };
  check_splits(input, input_splits, "input");
  check_splits(output, output_splits, "output");
  if (check.no_data({output, input})) return {};
  if (size() == 1) {
    check.numel(output, input, input.numel());
    return copy_alone({output}, {input});
  }
  const LabelScope label(label_of(call));
  Tensor to = movable_rows(*impl_, output);
  Tensor from = movable_rows(*impl_, input);
  std::vector<int64_t> receive = output_splits;
  std::vector<int64_t> send = input_splits;
  return finish(
      {impl_->backend->alltoall_base(
          to, from, receive, send, with_async<c10d::AllToAllOptions>(call))},
      call);
}

Work Group::broadcast(
    const Tensor& tensor, int source, const Call& call) const {
  const Checks check(*impl_, "broadcast");
  check.tensor(tensor);
  check.rank(source);
  if (size() == 1 || check.no_data({tensor})) return {};
  const LabelScope label(label_of(call));
  auto options = with_async<c10d::BroadcastOptions>(call);
  options.rootRank = source;
  std::vector<Tensor> tensors = {movable(*impl_, tensor)};
  return finish({impl_->backend->broadcast(tensors, options)}, call);
}

Work Group::reduce(
    const Tensor& tensor, int destination, echelon::ReduceOp op,
    const Call& call) const {
  const Checks check(*impl_, "reduce");
  check.tensor(tensor);
  check.rank(destination);
  const Reduction reduction = check.reduction(tensor, op);
  if (size() == 1 || check.no_data({tensor})) return {};
  const LabelScope label(label_of(call));
  auto options = with_async<c10d::ReduceOptions>(call);
  options.reduceOp = reduction.op;
  options.rootRank = destination;
  std::vector<Tensor> tensors = {reduction.tensor};
  return finish(
      {impl_->backend->reduce(tensors, options)}, call,
      rank() == destination ? divide({reduction}) : nullptr);
}

Work Group::gather(
    const std::vector<Tensor>& outputs, const Tensor& input, int destination,
    const Call& call) const {
  const Checks check(*impl_, "gather");
  check.one_per_rank(outputs, "outputs", destination, input);
  if (check.no_data(joined(outputs, {input}))) return {};
  if (size() == 1) return copy_alone(outputs, {input});
  const LabelScope label(label_of(call));
  auto options = with_async<c10d::GatherOptions>(call);
  options.rootRank = destination;
  std::vector<std::vector<Tensor>> to;
  if (rank() == destination) to.push_back(movable(*impl_, outputs));
  std::vector<Tensor> from = {movable(*impl_, input)};
  return finish({impl_->backend->gather(to, from, options)}, call);
}

Work Group::scatter(
    const Tensor& output, const std::vector<Tensor>& inputs, int source,
    const Call& call) const {
  const Checks check(*impl_, "scatter");
  check.one_per_rank(inputs, "inputs", source, output);
  if (check.no_data(joined(inputs, {output}))) return {};
  if (size() == 1) return copy_alone({output}, inputs);
  const LabelScope label(label_of(call));
  auto options = with_async<c10d::ScatterOptions>(call);
  options.rootRank = source;
  std::vector<std::vector<Tensor>> from;
  if (rank() == source) from.push_back(movable(*impl_, inputs));
  std::vector<Tensor> to = {movable(*impl_, output)};
  return finish({impl_->backend->scatter(to, from, options)}, call);
}

void Group::barrier(const Call& call) const {
  if (size() == 1 || Checks(*impl_, "barrier").no_data({})) return;
  const LabelScope label(label_of(call));
  c10d::BarrierOptions options;
  options.asyncOp = false;
  if (impl_->kind == BackendKind::nccl) options.device = impl_->device;
  finish({impl_->backend->barrier(options)}, call);
}

std::string Group::why_not_registered() const {
  if (!impl_->backend) return "a group that sends nothing needs none";
  if (impl_->kind != BackendKind::nccl) {
    return format(
        "the backend \"{}\" registers no memory; NCCL does",
        to_string(impl_->kind));
  }
  const bool here = impl_->backend->supportsTensorAlloc(impl_->device.index());
  const Tensor lacking = torch::full(
      {1}, here ? 0 : 1,
      torch::TensorOptions().dtype(torch::kInt32).device(impl_->device));
  all_reduce(lacking, echelon::ReduceOp::max, {.label = "registered memory"});
  if (!here) {
    return format(
        "LibTorch registers memory of GPUs with NVLink SHARP (multicast), "
        "which {} has not",
        impl_->device.str());
  }
  if (lacking.item<int32_t>() == 0) return "";
  return "another rank's GPU has no NVLink SHARP (multicast)";
}

Tensor Group::allocate_registered(int64_t bytes) const {
  const Checks check(*impl_, "allocate_registered");
  if (!impl_->backend ||
      !impl_->backend->supportsTensorAlloc(impl_->device.index())) {
    check.refuse("no memory is registered; see why_not_registered()");
  }
  if (is_capturing(impl_->device)) {
    check.refuse("none is registered while a graph is captured");
  }
  return impl_->backend->allocateTensor(
      static_cast<long>(bytes),
      torch::TensorOptions().dtype(torch::kUInt8).device(impl_->device));
}

}  // namespace echelon
