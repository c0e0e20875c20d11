// What arrives is sorted by rank, and within each by expert. Experts compute
// their rows at once, so these are permuted; the permutation follows from the
// counts of all ranks, which the host has anyway to know the sizes.
#include "echelon/parallel/expert/exchange.h"

#include <torch/autograd.h>
#include <torch/types.h>

#include <numeric>
#include <utility>

#include "echelon/comm/differentiable.h"
#include "echelon/parallel/expert/routing.h"

namespace echelon {
namespace {

using torch::Tensor;

class ScaledGradient : public torch::autograd::Function<ScaledGradient> {
 public:
  static Tensor forward(
      torch::autograd::AutogradContext* context, const Tensor& tensor,
      double factor) {
    context->saved_data["factor"] = factor;
    return tensor.detach();
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      const torch::autograd::variable_list& gradients) {
    return {gradients[0] * context->saved_data["factor"].toDouble(), Tensor()};
  }
};

// On `device`, without a wait for it.
Tensor whole_numbers(const std::vector<int64_t>& values, torch::Device device) {
  const auto host = torch::tensor(values, torch::kInt64);
  if (device.is_cpu()) return host;
  return host.pin_memory().to(device, /*non_blocking=*/true);
}

// Rows of this rank's experts, [rank * experts + expert].
std::vector<int64_t> exchange_counts(
    const std::vector<int64_t>& counts, const Group& group, const Tensor& like,
    const std::string& label) {
  const auto total = static_cast<int64_t>(counts.size());
  const auto own = experts_of(total, group);
  std::vector<int64_t> all;
  if (like.is_meta()) {
    for (int rank = 0; rank < group.size(); ++rank) {
      all.insert(
          all.end(), counts.begin() + own.begin, counts.begin() + own.end);
    }
    return all;
  }
  const torch::NoGradGuard no_grad;
  const auto mine = whole_numbers(counts, like.device());
  const auto received =
      torch::empty({group.size() * own.size()}, mine.options());
  group
      .all_to_all(
          received, mine,
          std::vector<int64_t>(static_cast<size_t>(group.size()), own.size()),
          even_split(total, group.size()), {.label = label + " counts"})
      .wait();
  const auto host = received.to(torch::kCPU);
  const auto* numbers = host.const_data_ptr<int64_t>();
  all.assign(numbers, numbers + host.numel());
  return all;
}

}  // namespace

IndexRange experts_of(int64_t experts, const Group& group) {
  return even_range(experts, group.rank(), group.size());
}

Exchange::Exchange(
    const std::vector<int64_t>& counts, const Group& group, const Tensor& like,
    std::string label)
    : group_(group), label_(std::move(label)), counts_(counts) {
  if (group_.size() == 1) return;
  const auto total = static_cast<int64_t>(counts.size());
  for (int rank = 0; rank < group_.size(); ++rank) {
    const auto theirs = even_range(total, rank, group_.size());
    sent_.push_back(std::accumulate(
        counts.begin() + theirs.begin, counts.begin() + theirs.end,
        int64_t{0}));
  }
  const auto from = exchange_counts(counts, group_, like, label_);
  const auto own = static_cast<size_t>(experts_of(total, group_).size());
  const auto ranks = static_cast<size_t>(group_.size());
  counts_.assign(own, 0);
  std::vector<int64_t> begins;  // of the rows of each rank and expert
  int64_t begin = 0;
  for (size_t i = 0; i < from.size(); ++i) {
    begins.push_back(begin);
    begin += from[i];
    counts_[i % own] += from[i];
  }
  std::vector<int64_t> order;
  order.reserve(static_cast<size_t>(begin));
  for (size_t expert = 0; expert < own; ++expert) {
    for (size_t rank = 0; rank < ranks; ++rank) {
      const size_t i = rank * own + expert;
      for (int64_t row = 0; row < from[i]; ++row) {
        order.push_back(begins[i] + row);
      }
    }
  }
  for (size_t rank = 0; rank < ranks; ++rank) {
    received_.push_back(std::accumulate(
        from.begin() + static_cast<int64_t>(rank * own),
        from.begin() + static_cast<int64_t>((rank + 1) * own), int64_t{0}));
  }
  const torch::NoGradGuard no_grad;
  order_ = like.is_meta()
               ? torch::empty(
                     {begin}, torch::dtype(torch::kInt64).device(torch::kMeta))
               : whole_numbers(order, like.device());
  inverse_ = torch::empty_like(order_);
  inverse_.scatter_(0, order_, torch::arange(order_.size(0), order_.options()));
}

Tensor Exchange::send(const Tensor& rows) const {
  if (group_.size() == 1) return rows;
  return permuted(
      all_to_all(rows, group_, sent_, received_, label_ + " dispatch"), order_,
      inverse_);
}

Tensor Exchange::give_back(const Tensor& rows) const {
  if (group_.size() == 1) return rows;
  return all_to_all(
      permuted(rows, inverse_, order_), group_, received_, sent_,
      label_ + " return");
}

Tensor with_scaled_gradient(const Tensor& tensor, double factor) {
  return factor == 1 ? tensor : ScaledGradient::apply(tensor, factor);
}

}  // namespace echelon
