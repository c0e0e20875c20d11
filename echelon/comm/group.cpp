#include "echelon/comm/group.h"

#include <algorithm>
#include <numeric>

#include "echelon/comm/group_impl.h"
#include "echelon/comm/trace/collective_trace.h"
#include "echelon/comm/trace/record.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using c10d::ReduceOp;
using torch::Tensor;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr auto kNoLimit = std::chrono::milliseconds(0);

template <typename... Values>
[[noreturn]] void refuse(
    const Group::Impl& group, const char* operation,
    std::type_identity_t<detail::FormatPattern<sizeof...(Values)>> rule,
    const Values&... values) {
  throw ConfigError(format(
      "{} on axis {} of {} ranks: {}", operation, group.axis,
      group.ranks.size(), format(rule, values...)));
}

std::string shape_of(const Tensor& tensor) {
  return shape_text(tensor.sizes().vec());
}

void check_tensor(
    const Group::Impl& group, const char* operation, const Tensor& tensor) {
  if (!tensor.defined()) refuse(group, operation, "a tensor is undefined");
  if (!tensor.is_contiguous()) {
    refuse(
        group, operation,
        "tensor {} is not contiguous; pass tensor.contiguous()",
        shape_of(tensor));
  }
  if (tensor.device().type() != group.device.type() && !tensor.is_meta() &&
      group.kind != BackendKind::local) {
    refuse(
        group, operation,
        "tensor is on {}, but the group's backend works on {}",
        tensor.device().str(), group.device.str());
  }
}

// Records a call that sends nothing; this rank's input comes last.
void trace(
    const Group::Impl& group, const char* operation,
    const std::vector<Tensor>& tensors) {
  if (!CollectiveTrace::active() || tensors.empty()) return;
  CollectiveTrace::record(
      {.operation = operation,
       .axis = group.axis,
       .bytes = static_cast<int64_t>(tensors.back().nbytes())});
}

// Whether there is nothing to send: in a silent group, and for tensors on the
// meta device. The other ranks need not agree: they may count another layer.
bool no_data(
    const Group::Impl& group, const char* operation,
    const std::vector<Tensor>& tensors) {
  if (!group.backend && group.ranks.size() > 1) {
    trace(group, operation, tensors);
    return true;
  }
  const auto meta = std::count_if(
      tensors.begin(), tensors.end(),
      [](const Tensor& tensor) { return tensor.is_meta(); });
  if (meta == 0) return false;
  if (static_cast<size_t>(meta) < tensors.size()) {
    refuse(
        group, operation,
        "some tensors are on the meta device, which has no values, and "
        "others are not");
  }
  if (group.ranks.size() > 1) trace(group, operation, tensors);
  return true;
}

std::vector<Tensor>
joined(std::vector<Tensor> list, const std::vector<Tensor>& more) {
  list.insert(list.end(), more.begin(), more.end());
  return list;
}

void check_same_dtype(
    const Group::Impl& group, const char* operation, const Tensor& output,
    const Tensor& input) {
  if (output.scalar_type() != input.scalar_type()) {
    refuse(
        group, operation, "output is {}, input is {}; they must agree",
        c10::toString(output.scalar_type()),
        c10::toString(input.scalar_type()));
  }
}

void check_numel(
    const Group::Impl& group, const char* operation, const Tensor& output,
    const Tensor& input, int64_t expected) {
  check_same_dtype(group, operation, output, input);
  if (output.numel() != expected) {
    refuse(
        group, operation, "input {} needs an output of {} elements, not {}",
        shape_of(input), expected, shape_of(output));
  }
}

void check_rank(const Group::Impl& group, const char* operation, int rank) {
  if (rank < 0 || rank >= static_cast<int>(group.ranks.size())) {
    refuse(group, operation, "rank {} is outside the group", rank);
  }
}

void check_peer(const Group::Impl& group, const char* operation, int rank) {
  check_rank(group, operation, rank);
  if (rank == group.rank) {
    refuse(group, operation, "rank {} is this rank", rank);
  }
}

/// `tensor` as bytes when the backend does not know its dtype; for calls that
/// move elements and do not reduce them.
Tensor movable(const Group::Impl& group, const Tensor& tensor) {
  const bool known = tensor.scalar_type() != torch::kBool &&
                     tensor.scalar_type() != torch::kShort;
  if (known || group.kind == BackendKind::local) return tensor;
  return tensor.view({-1}).view(torch::kByte);
}

/// As `movable`, with one row per row of `tensor`.
Tensor movable_rows(const Group::Impl& group, const Tensor& tensor) {
  const Tensor bytes = movable(group, tensor);
  if (bytes.is_same(tensor)) return tensor;
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  return bytes.view({rows, rows == 0 ? 0 : bytes.numel() / rows});
}

/// In one dimension for a backend that compares the shapes of input and output,
/// which callers choose freely.
Tensor flat(const Group::Impl& group, const Tensor& tensor) {
  return group.kind == BackendKind::gloo ? tensor.view({-1}) : tensor;
}

/// A reduction as the backends know it: bool becomes bytes with a maximum (or)
/// or minimum (and), and an average becomes a sum that is divided afterwards.
struct Reduction {
  Tensor tensor;
  ReduceOp op = ReduceOp::SUM;
  int64_t divide_by = 1;
};

Reduction reduction_of(
    const Group::Impl& group, const char* operation, const Tensor& tensor,
    echelon::ReduceOp op) {
  Reduction result{tensor};
  const torch::Dtype dtype = tensor.scalar_type();
  if (dtype == torch::kShort && group.kind != BackendKind::local) {
    refuse(
        group, operation,
        "{} cannot be reduced by this backend; convert to int32",
        c10::toString(dtype));
  }
  switch (op) {
    case echelon::ReduceOp::sum:
      break;
    case echelon::ReduceOp::avg:
      if (!torch::isFloatingType(dtype)) {
        refuse(
            group, operation,
            "an average of {} is not defined; reduce with sum",
            c10::toString(dtype));
      }
      if (group.kind == BackendKind::local) {
        result.op = ReduceOp::AVG;  // the sum, then one division, in place
      } else {
        result.divide_by = static_cast<int64_t>(group.ranks.size());
      }
      break;
    case echelon::ReduceOp::min:
      result.op = ReduceOp::MIN;
      break;
    case echelon::ReduceOp::max:
      result.op = ReduceOp::MAX;
      break;
  }
  if (dtype == torch::kBool) {
    result.tensor = tensor.view(torch::kByte);
    if (op == echelon::ReduceOp::sum) result.op = ReduceOp::MAX;
  }
  return result;
}

Work finish(
    std::vector<WorkPtr> works, const Call& call,
    std::function<void()> after = nullptr) {
  auto impl = std::make_shared<Work::Impl>();
  impl->works = std::move(works);
  impl->after = std::move(after);
  Work work(std::move(impl));
  if (!call.async) work.wait();
  return work;
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

/// The label of the collectives of `call`.
std::string label_of(const Call& call) {
  return call.label.empty() ? LabelScope::current() : call.label;
}

void copy_alone(const Tensor& output, const Tensor& input) {
  torch::NoGradGuard no_grad;
  Tensor to = output;
  if (!to.is_same(input)) to.view({-1}).copy_(input.reshape({-1}));
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
  return std::all_of(
      impl_->works.begin(), impl_->works.end(),
      [](const auto& work) { return work->isCompleted(); });
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
    const Tensor& tensor, echelon::ReduceOp op, const Call& call) const {
  check_tensor(*impl_, "all_reduce", tensor);
  const Reduction reduction = reduction_of(*impl_, "all_reduce", tensor, op);
  if (size() == 1 || no_data(*impl_, "all_reduce", {tensor})) return {};
  const LabelScope label(label_of(call));
  auto options = with_async<c10d::AllreduceOptions>(call);
  options.reduceOp = reduction.op;
  std::vector<Tensor> tensors = {reduction.tensor};
  return finish(
      {impl_->backend->allreduce(tensors, options)}, call, divide({reduction}));
}

Work Group::all_gather(
    const Tensor& output, const Tensor& input, const Call& call) const {
  check_tensor(*impl_, "all_gather", input);
  check_tensor(*impl_, "all_gather", output);
  check_numel(*impl_, "all_gather", output, input, input.numel() * size());
  if (no_data(*impl_, "all_gather", {output, input})) return {};
  if (size() == 1) {
    copy_alone(output, input);
    return {};
  }
  const LabelScope label(label_of(call));
  Tensor to = flat(*impl_, movable(*impl_, output));
  Tensor from = flat(*impl_, movable(*impl_, input));
  return finish(
      {impl_->backend->_allgather_base(
          to, from, with_async<c10d::AllgatherOptions>(call))},
      call);
}

Work Group::reduce_scatter(
    const Tensor& output, const Tensor& input, echelon::ReduceOp op,
    const Call& call) const {
  check_tensor(*impl_, "reduce_scatter", input);
  check_tensor(*impl_, "reduce_scatter", output);
  if (input.numel() % size() != 0) {
    refuse(
        *impl_, "reduce_scatter",
        "input {} does not divide into {} equal slices", shape_of(input),
        size());
  }
  check_numel(*impl_, "reduce_scatter", output, input, input.numel() / size());
  Reduction from = reduction_of(*impl_, "reduce_scatter", input, op);
  Reduction to = reduction_of(*impl_, "reduce_scatter", output, op);
  if (no_data(*impl_, "reduce_scatter", {output, input})) return {};
  if (size() == 1) {
    copy_alone(output, input);
    return {};
  }
  const LabelScope label(label_of(call));
  auto options = with_async<c10d::ReduceScatterOptions>(call);
  options.reduceOp = from.op;
  Tensor all_slices = flat(*impl_, from.tensor);
  Tensor own_slice = flat(*impl_, to.tensor);
  return finish(
      {impl_->backend->_reduce_scatter_base(own_slice, all_slices, options)},
      call, divide({to}));
}

Work Group::all_to_all(
    const Tensor& output, const Tensor& input,
    const std::vector<int64_t>& output_splits,
    const std::vector<int64_t>& input_splits, const Call& call) const {
  const char* name = "all_to_all";
  check_tensor(*impl_, name, input);
  check_tensor(*impl_, name, output);
  check_same_dtype(*impl_, name, output, input);
  const auto check_splits = [&](const Tensor& tensor,
                                const std::vector<int64_t>& splits,
                                const char* which) {
    const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
    if (splits.empty()) {
      if (rows % size() != 0) {
        refuse(
            *impl_, name, "{} {} does not divide along dim 0; give the splits",
            which, shape_of(tensor));
      }
      return;
    }
    const int64_t sum =
        std::accumulate(splits.begin(), splits.end(), int64_t{0});
    if (static_cast<int>(splits.size()) != size() || sum != rows ||
        std::ranges::any_of(splits, [](int64_t split) { return split < 0; })) {
      refuse(
          *impl_, name,
          "{} splits must be {} numbers, 0 or more, that sum to {}, the "
          "size of dim 0",
          which, size(), rows);
    }
  };
  check_splits(input, input_splits, "input");
  check_splits(output, output_splits, "output");
  if (no_data(*impl_, name, {output, input})) return {};
  if (size() == 1) {
    check_numel(*impl_, name, output, input, input.numel());
    copy_alone(output, input);
    return {};
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
  check_tensor(*impl_, "broadcast", tensor);
  check_rank(*impl_, "broadcast", source);
  if (size() == 1 || no_data(*impl_, "broadcast", {tensor})) return {};
  const LabelScope label(label_of(call));
  auto options = with_async<c10d::BroadcastOptions>(call);
  options.rootRank = source;
  std::vector<Tensor> tensors = {movable(*impl_, tensor)};
  return finish({impl_->backend->broadcast(tensors, options)}, call);
}

Work Group::reduce(
    const Tensor& tensor, int destination, echelon::ReduceOp op,
    const Call& call) const {
  check_tensor(*impl_, "reduce", tensor);
  check_rank(*impl_, "reduce", destination);
  const Reduction reduction = reduction_of(*impl_, "reduce", tensor, op);
  if (size() == 1 || no_data(*impl_, "reduce", {tensor})) return {};
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
  check_tensor(*impl_, "gather", input);
  check_rank(*impl_, "gather", destination);
  const size_t expected =
      rank() == destination ? static_cast<size_t>(size()) : 0;
  if (outputs.size() != expected) {
    refuse(
        *impl_, "gather", "rank {} needs {} outputs, got {}", rank(), expected,
        outputs.size());
  }
  for (const auto& output : outputs) {
    check_tensor(*impl_, "gather", output);
    check_numel(*impl_, "gather", output, input, input.numel());
  }
  if (no_data(*impl_, "gather", joined(outputs, {input}))) return {};
  if (size() == 1) {
    copy_alone(outputs[0], input);
    return {};
  }
  const LabelScope label(label_of(call));
  auto options = with_async<c10d::GatherOptions>(call);
  options.rootRank = destination;
  std::vector<std::vector<Tensor>> to;
  if (rank() == destination) {
    to.emplace_back();
    for (const auto& output : outputs) {
      to[0].push_back(movable(*impl_, output));
    }
  }
  std::vector<Tensor> from = {movable(*impl_, input)};
  return finish({impl_->backend->gather(to, from, options)}, call);
}

Work Group::scatter(
    const Tensor& output, const std::vector<Tensor>& inputs, int source,
    const Call& call) const {
  check_tensor(*impl_, "scatter", output);
  check_rank(*impl_, "scatter", source);
  const size_t expected = rank() == source ? static_cast<size_t>(size()) : 0;
  if (inputs.size() != expected) {
    refuse(
        *impl_, "scatter", "rank {} needs {} inputs, got {}", rank(), expected,
        inputs.size());
  }
  for (const auto& input : inputs) {
    check_tensor(*impl_, "scatter", input);
    check_numel(*impl_, "scatter", output, input, input.numel());
  }
  if (no_data(*impl_, "scatter", joined(inputs, {output}))) return {};
  if (size() == 1) {
    copy_alone(output, inputs[0]);
    return {};
  }
  const LabelScope label(label_of(call));
  auto options = with_async<c10d::ScatterOptions>(call);
  options.rootRank = source;
  std::vector<std::vector<Tensor>> from;
  if (rank() == source) {
    from.emplace_back();
    for (const auto& input : inputs) {
      from[0].push_back(movable(*impl_, input));
    }
  }
  std::vector<Tensor> to = {movable(*impl_, output)};
  return finish({impl_->backend->scatter(to, from, options)}, call);
}

Work Group::send(
    const Tensor& tensor, int destination, int tag, const Call& call) const {
  return batch_send_recv(
      {{.send = true, .tensor = tensor, .peer = destination, .tag = tag}},
      call);
}

Work Group::recv(
    const Tensor& tensor, int source, int tag, const Call& call) const {
  return batch_send_recv(
      {{.send = false, .tensor = tensor, .peer = source, .tag = tag}}, call);
}

Work Group::batch_send_recv(
    const std::vector<PeerMessage>& messages, const Call& call) const {
  for (const auto& message : messages) {
    const char* name = message.send ? "send" : "recv";
    check_tensor(*impl_, name, message.tensor);
    check_peer(*impl_, name, message.peer);
    if (message.tag < 0) {
      refuse(*impl_, name, "tag {} must be 0 or more", message.tag);
    }
  }
  std::vector<Tensor> all;
  for (const auto& message : messages) all.push_back(message.tensor);
  if (all.empty() || no_data(*impl_, "batch_send_recv", all)) return {};
  const LabelScope label(label_of(call));
  // NCCL starts a group of messages together; the others never block here.
  const bool coalesce = impl_->kind == BackendKind::nccl && messages.size() > 1;
  if (coalesce) impl_->backend->startCoalescing();
  std::vector<WorkPtr> works;
  for (const auto& message : messages) {
    std::vector<Tensor> tensors = {movable(*impl_, message.tensor)};
    works.push_back(
        message.send
            ? impl_->backend->send(tensors, message.peer, message.tag)
            : impl_->backend->recv(tensors, message.peer, message.tag));
  }
  if (coalesce) works = {impl_->backend->endCoalescing()};
  return finish(std::move(works), call);
}

namespace {

void check_list(
    const Group::Impl& group, const char* operation,
    const std::vector<Tensor>& tensors) {
  if (tensors.empty()) refuse(group, operation, "the list of tensors is empty");
  for (const auto& tensor : tensors) {
    check_tensor(group, operation, tensor);
    check_same_dtype(group, operation, tensor, tensors.front());
  }
}

void check_pairs(
    const Group::Impl& group, const char* operation,
    const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs) {
  check_list(group, operation, outputs);
  check_list(group, operation, inputs);
  if (outputs.size() != inputs.size()) {
    refuse(
        group, operation, "{} outputs for {} inputs", outputs.size(),
        inputs.size());
  }
}

}  // namespace

Work Group::all_reduce(
    const std::vector<Tensor>& tensors, echelon::ReduceOp op,
    const Call& call) const {
  check_list(*impl_, "all_reduce", tensors);
  std::vector<Reduction> reductions;
  std::vector<Tensor> flat;
  for (const auto& tensor : tensors) {
    reductions.push_back(reduction_of(*impl_, "all_reduce", tensor, op));
    flat.push_back(reductions.back().tensor);
  }
  if (size() == 1 || no_data(*impl_, "all_reduce", tensors)) return {};
  const LabelScope label(label_of(call));
  auto options = with_async<c10d::AllreduceCoalescedOptions>(call);
  options.reduceOp = reductions.front().op;
  return finish(
      {impl_->backend->allreduce_coalesced(flat, options)}, call,
      divide(reductions));
}

Work Group::all_gather(
    const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs,
    const Call& call) const {
  check_pairs(*impl_, "all_gather", outputs, inputs);
  const bool sends =
      !no_data(*impl_, "all_gather", joined(outputs, inputs)) && size() > 1;
  std::vector<Tensor> to;
  std::vector<Tensor> from;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_numel(
        *impl_, "all_gather", outputs[i], inputs[i],
        inputs[i].numel() * size());
    to.push_back(flat(*impl_, movable(*impl_, outputs[i])));
    from.push_back(flat(*impl_, movable(*impl_, inputs[i])));
    if (size() == 1) copy_alone(outputs[i], inputs[i]);
  }
  if (!sends) return {};
  const LabelScope label(label_of(call));
  return finish(
      {impl_->backend->allgather_into_tensor_coalesced(
          to, from, with_async<c10d::AllgatherOptions>(call))},
      call);
}

Work Group::reduce_scatter(
    const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs,
    echelon::ReduceOp op, const Call& call) const {
  check_pairs(*impl_, "reduce_scatter", outputs, inputs);
  const bool sends =
      !no_data(*impl_, "reduce_scatter", joined(outputs, inputs)) && size() > 1;
  std::vector<Reduction> results;
  std::vector<Tensor> to;
  std::vector<Tensor> from;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_numel(
        *impl_, "reduce_scatter", outputs[i], inputs[i],
        inputs[i].numel() / size());
    results.push_back(reduction_of(*impl_, "reduce_scatter", outputs[i], op));
    to.push_back(flat(*impl_, results.back().tensor));
    from.push_back(flat(
        *impl_, reduction_of(*impl_, "reduce_scatter", inputs[i], op).tensor));
    if (size() == 1) copy_alone(outputs[i], inputs[i]);
  }
  if (!sends) return {};
  const LabelScope label(label_of(call));
  auto options = with_async<c10d::ReduceScatterOptions>(call);
  options.reduceOp = results.front().op;
  return finish(
      {impl_->backend->reduce_scatter_tensor_coalesced(to, from, options)},
      call, divide(results));
}

void Group::barrier(const Call& call) const {
  if (size() == 1 || no_data(*impl_, "barrier", {})) return;
  const LabelScope label(label_of(call));
  c10d::BarrierOptions options;
  options.asyncOp = false;
  if (impl_->device.is_cuda()) options.device = impl_->device;
  impl_->backend->barrier(options)->wait(kNoLimit);
}

}  // namespace echelon
