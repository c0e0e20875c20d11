#include "echelon/parallel/tensor/shared_gradients.h"

#include <torch/nn/module.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <map>
#include <set>

namespace echelon {
namespace {

bool has_all(const Shard& shard) {
  return shard.local_shape() == shard.shape && shard.pieces.size() == 1;
}

// The gradient of the unsharded parameter, with zeros outside of this rank's
// shard. Other ranks may have other shards; all sum tensors of this one shape.
torch::Tensor
unsharded_gradient(const torch::Tensor& parameter, const Shard& shard) {
  const auto gradient = parameter.grad();
  if (gradient.defined() && has_all(shard)) return gradient.contiguous();
  auto unsharded = torch::zeros(shard.shape, parameter.options());
  if (gradient.defined()) copy_into_full(unsharded, gradient, shard);
  return unsharded;
}

}  // namespace

SharedGradients::SharedGradients(
    const torch::nn::Module& network, const TensorParallel& parallel)
    : group_(parallel.group) {
  if (parallel.size() == 1) return;
  const auto shards = shards_of(network);
  std::set<const void*> seen;  // a tied parameter has several names
  for (const auto& item : network.named_parameters()) {
    const auto found = shards.find(item.key());
    if (found == shards.end() || !found->second.sum_gradients) continue;
    if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    shared_.push_back({item.value(), found->second.shard});
  }
}

void SharedGradients::finish() {
  sum(shared_);
}

void SharedGradients::finish(const std::vector<torch::Tensor>& parameters) {
  std::set<const void*> asked;
  for (const auto& parameter : parameters) {
    asked.insert(parameter.unsafeGetTensorImpl());
  }
  std::vector<Shared> among;
  for (const auto& shared : shared_) {
    if (asked.count(shared.parameter.unsafeGetTensorImpl()) > 0) {
      among.push_back(shared);
    }
  }
  sum(among);
}

void SharedGradients::sum(const std::vector<Shared>& all) {
  std::map<torch::Dtype, std::vector<Shared>> by_dtype;
  for (const auto& shared : all) {
    if (!shared.parameter.requires_grad()) continue;
    by_dtype[shared.parameter.scalar_type()].push_back(shared);
  }
  for (const auto& [_, group] : by_dtype) sum_of_one_dtype(group);
}

void SharedGradients::sum_of_one_dtype(
    const std::vector<Shared>& of_one_dtype) {
  const torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> sums;
  for (const auto& shared : of_one_dtype) {
    sums.push_back(unsharded_gradient(shared.parameter, shared.shard));
  }
  // Summed with them: on how many ranks backward reached each parameter. It is
  // made on the device; a copy from the host would wait.
  const auto count = static_cast<int64_t>(of_one_dtype.size());
  const auto reached_here = torch::ones({count}, sums.front().options());
  for (int64_t i = 0; i < count; ++i) {
    const auto& parameter = of_one_dtype[static_cast<size_t>(i)].parameter;
    if (!parameter.grad().defined()) reached_here[i].fill_(0);
  }
  sums.push_back(reached_here);
  group_.all_reduce(sums, ReduceOp::sum, {.label = "shared_gradients sum"});
  torch::Tensor reached;
  for (size_t i = 0; i < of_one_dtype.size(); ++i) {
    auto parameter = of_one_dtype[i].parameter;
    auto& gradient = parameter.mutable_grad();
    const auto part = slice_of(sums[i], of_one_dtype[i].shard);
    if (gradient.defined()) {
      if (!gradient.is_alias_of(part)) gradient.copy_(part);
      continue;
    }
    if (!reached.defined()) reached = sums.back().cpu();
    if (reached[static_cast<int64_t>(i)].item<float>() > 0) {
      gradient = part.clone(torch::MemoryFormat::Contiguous);
    }
  }
}

}  // namespace echelon
