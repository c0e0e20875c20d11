#include "echelon/parallel/tensor/conv.h"

#include <torch/types.h>

#include <cmath>
#include <ostream>
#include <utility>
#include <vector>

#include "echelon/comm/differentiable.h"
#include "echelon/error.h"
#include "echelon/layers/channels_last.h"
#include "echelon/layers/low_precision.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

constexpr int64_t kChannelDim = 1;

// Whether sums of results take fewer bytes than the input.
bool results_are_smaller(const ConvShape& shape) {
  return shape.out <= shape.in * shape.stride * shape.stride;
}

}  // namespace

void check_channels(
    const std::string& label, int64_t channels,
    const TensorParallel& parallel) {
  if (parallel.size() <= channels) return;
  throw ConfigError(format(
      "[layout] tp={}, but {} has {} channels: each tensor-parallel rank needs "
      "one; tp of 1 to {} fits",
      parallel.size(), label, channels, channels));
}

ParallelConv2d::ParallelConv2d(
    const ConvShape& shape, TensorParallel parallel, std::string label,
    Channels from, Channels to)
    : shape_(shape),
      parallel_(std::move(parallel)),
      label_(std::move(label)),
      from_(from),
      to_(to),
      shards_inputs_(
          from == Channels::sharded &&
          (to == Channels::replicated || results_are_smaller(shape))) {
  if (from == Channels::sharded) check_channels(label_, shape.in, parallel_);
  if (!shards_inputs_ || to == Channels::sharded) {
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
                     shards_inputs_ ? 1 : 0, rank, size),
                 .initial = first});
  if (!shape.bias) return;
  const bool whole = shards_inputs_ && to == Channels::replicated;
  bias = register_shard(
      "bias", {.shard = whole ? replicated({shape.out}, rank)
                              : even_shard({shape.out}, 0, rank, size),
               .initial = first});
}

torch::Tensor ParallelConv2d::convolve(
    const torch::Tensor& x, const torch::Tensor& own_bias) const {
  return at::conv2d(x, weight, own_bias, shape_.stride, shape_.kernel / 2);
}

// Collectives send contiguous tensors. Of images with channels last they send
// [n, h, w, channels], so that results have channels last too, and a sum over
// ranks transposes nothing. All ranks decide alike, whatever strides their own
// channels have.
torch::Tensor ParallelConv2d::forward(const torch::Tensor& given) {
  const bool last = prefers_channels_last(given);
  const auto x = last ? with_channels_last(given) : given;
  const Group& group = parallel_.group;
  if (parallel_.size() == 1) return convolve(x, bias);
  const int64_t dim = last ? 3 : kChannelDim;
  const auto sent = [last](const torch::Tensor& images) {
    return last ? images.permute({0, 2, 3, 1}) : images;
  };
  const auto received = [last](const torch::Tensor& images) {
    return last ? images.permute({0, 3, 1, 2}) : images;
  };
  const auto outputs = even_split(shape_.out, parallel_.size());
  if (!shards_inputs_) {
    const auto all = from_ == Channels::replicated
                         ? copy_to(sent(x), group, label_)
                         : all_gather(
                               sent(x), group, dim,
                               even_split(shape_.in, parallel_.size()), label_);
    const auto y = convolve(received(all), bias);
    return to_ == Channels::sharded
               ? y
               : received(gather_from(sent(y), group, dim, outputs, label_));
  }
  auto y = sent(convolve(x, {}));
  y = received(
      to_ == Channels::sharded ? reduce_scatter(y, group, dim, outputs, label_)
                               : reduce_from(y, group, label_));
  return bias.defined() ? y + bias.view({1, -1, 1, 1}) : y;
}

void ParallelConv2d::pretty_print(std::ostream& stream) const {
  stream << "Conv2d(" << shape_.in << ", " << shape_.out << ", "
         << shape_.kernel << "x" << shape_.kernel << ", stride "
         << shape_.stride << ")";
  if (parallel_.size() > 1) {
    stream << " sharded by " << (shards_inputs_ ? "inputs" : "outputs");
  }
}

// The kernels take x in low precision with float32 parameters and statistics.
torch::Tensor BatchNorm2d::forward(const torch::Tensor& x) {
  if (!is_low_precision(x.scalar_type())) return BatchNorm2dImpl::forward(x);
  if (running_mean.defined() && running_mean.scalar_type() != torch::kFloat32) {
    throw ConfigError(format(
        "[batch norm] running statistics are in {}, which cannot hold their "
        "small steps; convert the parameters alone, and leave buffers in "
        "float32",
        c10::toString(running_mean.scalar_type())));
  }
  double momentum = options.momentum().value_or(0.0);
  if (is_training() && num_batches_tracked.defined()) {
    num_batches_tracked += 1;
    if (!options.momentum().has_value()) {
      momentum = 1.0 / num_batches_tracked.item<double>();
    }
  }
  return torch::batch_norm(
      x, for_sums(weight), for_sums(bias), running_mean, running_var,
      is_training() || !options.track_running_stats(), momentum, options.eps(),
      /*cudnn_enabled=*/true);
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
