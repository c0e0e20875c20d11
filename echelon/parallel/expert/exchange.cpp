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

std::vector<int64_t> numbers_of(const Tensor& host) {
  const auto* begin = host.const_data_ptr<int64_t>();
  return {begin, begin + host.numel()};
}

int64_t
sum_of(const std::vector<int64_t>& numbers, size_t begin, size_t count) {
  const auto first = numbers.begin() + static_cast<int64_t>(begin);
  return std::accumulate(
      first, first + static_cast<int64_t>(count), int64_t{0});
}

}  // namespace

IndexRange experts_of(int64_t experts, const Group& group) {
  return even_range(experts, group.rank(), group.size());
}

Exchange::Exchange(
    const RowCounts& counts, const Group& group, const Tensor& like,
    std::string label)
    : group_(group),
      label_(std::move(label)),
      counts_(counts),
      device_(like.device()) {
  if (group_.size() == 1 || like.is_meta()) return;
  const torch::NoGradGuard no_grad;
  const auto mine = counts.on(device_);
  const int64_t total = mine.size(0);
  const int64_t own = experts_of(total, group_).size();
  const auto coming = torch::empty({group_.size() * own}, mine.options());
  group_
      .all_to_all(
          coming, mine,
          std::vector<int64_t>(static_cast<size_t>(group_.size()), own),
          even_split(total, group_.size()), {.label = label_ + " counts"})
      .wait();
  numbers_.emplace(std::vector<Tensor>{mine, coming});
}

void Exchange::settle() {
  if (group_.size() == 1) return;
  std::vector<int64_t> mine, from;
  if (numbers_) {
    const auto& host = numbers_->wait();
    mine = numbers_of(host[0]);
    from = numbers_of(host[1]);
    numbers_.reset();
  } else {  // on the meta device
    mine = counts_.on_host();
    const auto theirs = experts_of(std::ssize(mine), group_);
    for (int rank = 0; rank < group_.size(); ++rank) {
      from.insert(
          from.end(), mine.begin() + theirs.begin, mine.begin() + theirs.end);
    }
  }
  const auto ranks = static_cast<size_t>(group_.size());
  const size_t own = from.size() / ranks;
  for (size_t rank = 0; rank < ranks; ++rank) {
    const auto theirs =
        even_range(std::ssize(mine), static_cast<int64_t>(rank), group_.size());
    sent_.push_back(sum_of(
        mine, static_cast<size_t>(theirs.begin),
        static_cast<size_t>(theirs.size())));
    received_.push_back(sum_of(from, rank * own, own));
  }
  std::vector<int64_t> counts(own, 0);
  std::vector<int64_t> begins;  // of the rows of each rank and expert
  int64_t begin = 0;
  for (size_t i = 0; i < from.size(); ++i) {
    begins.push_back(begin);
    begin += from[i];
    counts[i % own] += from[i];
  }
  counts_ = RowCounts(std::move(counts));
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
  const torch::NoGradGuard no_grad;
  order_ = device_.is_meta()
               ? torch::empty(
                     {begin}, torch::dtype(torch::kInt64).device(torch::kMeta))
               : to_device(torch::tensor(order, torch::kInt64), device_);
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
