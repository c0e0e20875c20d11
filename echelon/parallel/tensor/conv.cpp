#include "echelon/parallel/tensor/conv.h"

#include <torch/types.h>

#include <cmath>
#include <ostream>
#include <utility>
#include <vector>

#include "echelon/comm/differentiable.h"
#include "echelon/error.h"

namespace echelon {
namespace {

constexpr int64_t kChannelDim = 1;

// Of results that are sums, against those of the input.
bool results_are_smaller(const ConvShape& shape) {
  return shape.out <= shape.in * shape.stride * shape.stride;
}

std::vector<int64_t>
parts_of(int64_t channels, const TensorParallel& parallel) {
  return even_split(channels, parallel.size());
}

}  // namespace

void check_channels(
    const std::string& label, int64_t channels,
    const TensorParallel& parallel) {
  if (parallel.size() <= channels) return;
  throw ConfigError(
      "[layout] tp=" + std::to_string(parallel.size()) + ", but " + label +
      " has " + std::to_string(channels) +
      " channels: each tensor-parallel rank needs one; tp of 1 to " +
      std::to_string(channels) + " fits");
}

ParallelConv2d::ParallelConv2d(
    const ConvShape& shape, TensorParallel parallel, std::string label,
    Channels from, Channels to)
    : shape_(shape),
      parallel_(std::move(parallel)),
      label_(std::move(label)),
      from_(from),
      to_(to),
      cuts_inputs_(
          from == Channels::cut &&
          (to == Channels::replicated || results_are_smaller(shape))) {
  if (from == Channels::cut) check_channels(label_, shape.in, parallel_);
  if (!cuts_inputs_ || to == Channels::cut) {
    check_channels(label_, shape.out, parallel_);
  }
  const int rank = parallel_.rank();
  const int size = parallel_.size();
  const auto first = InitialValue::uniform_within(
      1 / (std::sqrt(static_cast<double>(shape.in)) *
           static_cast<double>(shape.kernel)));
  weight = register_shard(
      "weight", {.shard = even_shard(
                     {shape.out, shape.in, shape.kernel, shape.kernel},
                     cuts_inputs_ ? 1 : 0, rank, size),
                 .initial = first});
  if (!shape.bias) return;
  const bool whole = cuts_inputs_ && to == Channels::replicated;
  bias = register_shard(
      "bias", {.shard = whole ? replicated({shape.out}, rank)
                              : even_shard({shape.out}, 0, rank, size),
               .initial = first});
}

torch::Tensor ParallelConv2d::product(
    const torch::Tensor& x, const torch::Tensor& bias_of_all) const {
  return at::conv2d(x, weight, bias_of_all, shape_.stride, shape_.kernel / 2);
}

torch::Tensor ParallelConv2d::forward(const torch::Tensor& x) {
  const Group& group = parallel_.group;
  if (parallel_.size() == 1) return product(x, bias);
  const auto outputs = parts_of(shape_.out, parallel_);
  if (!cuts_inputs_) {
    const auto all = from_ == Channels::replicated
                         ? copy_to(x, group, label_)
                         : all_gather(
                               x, group, kChannelDim,
                               parts_of(shape_.in, parallel_), label_);
    const auto y = product(all, bias);
    return to_ == Channels::cut
               ? y
               : gather_from(y, group, kChannelDim, outputs, label_);
  }
  auto y = product(x, {});
  y = to_ == Channels::cut
          ? reduce_scatter(y, group, kChannelDim, outputs, label_)
          : reduce_from(y, group, label_);
  return bias.defined() ? y + bias.view({1, -1, 1, 1}) : y;
}

void ParallelConv2d::pretty_print(std::ostream& stream) const {
  stream << "Conv2d(" << shape_.in << ", " << shape_.out << ", "
         << shape_.kernel << "x" << shape_.kernel << ", stride "
         << shape_.stride << ")";
  if (parallel_.size() > 1) {
    stream << " cut by " << (cuts_inputs_ ? "inputs" : "outputs");
  }
}

ParallelBatchNorm2d::ParallelBatchNorm2d(
    int64_t channels, const TensorParallel& parallel, const std::string& label)
    : BatchNorm2d(parallel.part_of(channels).size()) {
  check_channels(label, channels, parallel);
  const auto mine = even_shard({channels}, 0, parallel.rank(), parallel.size());
  for (const char* name : {"weight", "running_var"}) {
    shards_[name] = {.shard = mine, .initial = InitialValue::constant_of(1)};
  }
  for (const char* name : {"bias", "running_mean"}) {
    shards_[name] = {.shard = mine};
  }
}

}  // namespace echelon
