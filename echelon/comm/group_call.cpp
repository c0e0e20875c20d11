#include "echelon/comm/group_call.h"

#include <algorithm>

#include "echelon/comm/trace/record.h"

namespace echelon::detail {

using torch::Tensor;

namespace {

std::string shape_of(const Tensor& tensor) {
  return shape_text(tensor.sizes().vec());
}

}  // namespace

void Checks::tensor(const Tensor& tensor) const {
  if (!tensor.defined()) refuse("a tensor is undefined");
  if (!tensor.is_contiguous()) {
    refuse(
        "tensor {} is not contiguous; pass tensor.contiguous()",
        shape_of(tensor));
  }
  if (tensor.device().type() != group_.device.type() && !tensor.is_meta() &&
      group_.kind != BackendKind::local) {
    refuse(
        "tensor is on {}, but the group's backend works on {}",
        tensor.device().str(), group_.device.str());
  }
}

void Checks::same_dtype(const Tensor& output, const Tensor& input) const {
  if (output.scalar_type() != input.scalar_type()) {
    refuse(
        "output is {}, input is {}; they must agree",
        c10::toString(output.scalar_type()),
        c10::toString(input.scalar_type()));
  }
}

void Checks::numel(
    const Tensor& output, const Tensor& input, int64_t expected) const {
  same_dtype(output, input);
  if (output.numel() != expected) {
    refuse(
        "input {} needs an output of {} elements, not {}", shape_of(input),
        expected, shape_of(output));
  }
}

void Checks::one_per_rank(
    const std::vector<Tensor>& tensors, const char* what, int root,
    const Tensor& model) const {
  tensor(model);
  rank(root);
  const size_t expected = group_.rank == root ? group_.ranks.size() : 0;
  if (tensors.size() != expected) {
    refuse(
        "rank {} needs {} {}, got {}", group_.rank, expected, what,
        tensors.size());
  }
  for (const auto& one : tensors) {
    tensor(one);
    numel(one, model, model.numel());
  }
}

void Checks::list(const std::vector<Tensor>& tensors) const {
  if (tensors.empty()) refuse("the list of tensors is empty");
  for (const auto& one : tensors) {
    tensor(one);
    same_dtype(one, tensors.front());
  }
}

void Checks::pairs(
    const std::vector<Tensor>& outputs,
    const std::vector<Tensor>& inputs) const {
  list(outputs);
  list(inputs);
  if (outputs.size() != inputs.size()) {
    refuse("{} outputs for {} inputs", outputs.size(), inputs.size());
  }
}

void Checks::rank(int rank) const {
  if (rank < 0 || rank >= static_cast<int>(group_.ranks.size())) {
    refuse("rank {} is outside the group", rank);
  }
}

void Checks::peer(int rank) const {
  this->rank(rank);
  if (rank == group_.rank) refuse("rank {} is this rank", rank);
}

bool Checks::no_data(const std::vector<Tensor>& tensors) const {
  if (!group_.backend && group_.ranks.size() > 1) {
    trace(tensors);
    return true;
  }
  const auto meta = std::ranges::count_if(
      tensors, [](const Tensor& tensor) { return tensor.is_meta(); });
  if (meta == 0) return false;
  if (static_cast<size_t>(meta) < tensors.size()) {
    refuse(
        "some tensors are on the meta device, which has no values, and "
        "others are not");
  }
  if (group_.ranks.size() > 1) trace(tensors);
  return true;
}

Reduction Checks::reduction(const Tensor& tensor, echelon::ReduceOp op) const {
  Reduction result{tensor};
  const torch::Dtype dtype = tensor.scalar_type();
  if (dtype == torch::kShort && group_.kind != BackendKind::local) {
    refuse(
        "{} cannot be reduced by this backend; convert to int32",
        c10::toString(dtype));
  }
  switch (op) {
    case echelon::ReduceOp::sum:
      break;
    case echelon::ReduceOp::avg:
      if (!torch::isFloatingType(dtype)) {
        refuse(
            "an average of {} is not defined; reduce with sum",
            c10::toString(dtype));
      }
      if (group_.kind == BackendKind::local) {
        result.op =
            c10d::ReduceOp::AVG;  // the sum, then one division, in place
      } else {
        result.divide_by = static_cast<int64_t>(group_.ranks.size());
      }
      break;
    case echelon::ReduceOp::min:
      result.op = c10d::ReduceOp::MIN;
      break;
    case echelon::ReduceOp::max:
      result.op = c10d::ReduceOp::MAX;
      break;
  }
  if (dtype == torch::kBool) {
    result.tensor = tensor.view(torch::kByte);
    if (op == echelon::ReduceOp::sum) result.op = c10d::ReduceOp::MAX;
  }
  return result;
}

void Checks::trace(const std::vector<Tensor>& tensors) const {
  if (!CollectiveTrace::active() || tensors.empty()) return;
  CollectiveTrace::record(
      {.operation = operation_,
       .axis = group_.axis,
       .bytes = static_cast<int64_t>(tensors.back().nbytes())});
}

Tensor movable(const Group::Impl& group, const Tensor& tensor) {
  const bool known = tensor.scalar_type() != torch::kBool &&
                     tensor.scalar_type() != torch::kShort;
  if (known || group.kind == BackendKind::local) return tensor;
  return tensor.view({-1}).view(torch::kByte);
}

std::vector<Tensor>
movable(const Group::Impl& group, const std::vector<Tensor>& tensors) {
  std::vector<Tensor> all;
  for (const auto& tensor : tensors) all.push_back(movable(group, tensor));
  return all;
}

Work finish(
    std::vector<WorkPtr> works, const Call& call, std::function<void()> after) {
  std::erase(works, nullptr);
  if (works.empty() && !after) return {};
  auto impl = std::make_shared<Work::Impl>();
  impl->works = std::move(works);
  impl->after = std::move(after);
  Work work(std::move(impl));
  if (!call.async) work.wait();
  return work;
}

Work nothing_sent(const Call& call) {
  auto wait = call.async ? CollectiveTrace::wait_of_last() : nullptr;
  if (!wait) return {};
  auto impl = std::make_shared<Work::Impl>();
  impl->after = std::move(wait);
  return Work(std::move(impl));
}

std::string label_of(const Call& call) {
  return call.label.empty() ? LabelScope::current() : call.label;
}

}  // namespace echelon::detail
