// Convolutions and batch normalisation whose channels are sharded over a
// tensor-parallel group.
//
// Between two convolutions each rank has the images of an even share of the
// channels. Layers that treat channels separately (batch normalisation, ReLU,
// pooling, residual sums) work on those alone. A convolution mixes all
// channels, so it is sharded like a matrix: by outputs, which needs all inputs,
// or by inputs, whose results are sums over the ranks.
//
// Source: Dryden et al., "Channel and Filter Parallelism for Large-Scale CNN
// Training", 2019.
#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/types.h>

#include <cstdint>
#include <string>

#include "echelon/layers/sharded_module.h"
#include "echelon/parallel/tensor/tensor_parallel.h"

namespace echelon {

struct ConvShape {
  int64_t in = 1;
  int64_t out = 1;
  int64_t kernel = 3;
  int64_t stride = 1;
  bool bias = true;
};

/// The channels of an image between layers: all on every rank, or even_range of
/// them on each.
enum class Channels { replicated, sharded };

/// Throws ConfigError, with the numbers, when some rank would have no channel.
void check_channels(
    const std::string& label, int64_t channels, const TensorParallel& parallel);

/// A convolution with padding kernel / 2.
///
///   from        to          is sharded by           sends, forward | backward
///   replicated  sharded     outputs                 nothing | all-reduce
///   sharded     replicated  inputs                  all-reduce | nothing
///   replicated  replicated  outputs                 all-gather | all-reduce
///   sharded     sharded     inputs, when its results are smaller than its
///                           input: reduce-scatter | all-gather; else outputs:
///                           all-gather | reduce-scatter
///
/// weight [out_r, in, kernel, kernel] or [out, in_r, kernel, kernel]. bias
/// [out_r], or [out] where the weight is sharded by inputs and the result is
/// replicated. Both are initialised uniformly within 1 / sqrt(in * kernel *
/// kernel), by initialize_shards.
class ParallelConv2d : public ShardedModule {
 public:
  /// Throws ConfigError as check_channels does for sharded channels.
  ParallelConv2d(
      const ConvShape& shape, TensorParallel parallel, std::string label,
      Channels from, Channels to);

  /// x [batch, in or in_r, h, w] -> [batch, out or out_r, ceil(h / stride), …].
  /// Every rank of the group calls this. x becomes channels last where that is
  /// faster (prefers_channels_last), and the result is so too.
  torch::Tensor forward(const torch::Tensor& x);

  bool shards_inputs() const { return shards_inputs_; }

  torch::Tensor weight;
  torch::Tensor bias;  // undefined without

 private:
  void pretty_print(std::ostream& stream) const override;
  torch::Tensor
  convolve(const torch::Tensor& x, const torch::Tensor& own_bias) const;

  ConvShape shape_;
  TensorParallel parallel_;
  std::string label_;
  Channels from_;
  Channels to_;
  bool shards_inputs_;
};

/// torch::nn::BatchNorm2d. For x in bf16 or fp16 the statistics are computed in
/// float32. Running statistics stay in float32, whatever the dtype of the
/// parameters.
class BatchNorm2d : public torch::nn::BatchNorm2dImpl {
 public:
  using BatchNorm2dImpl::BatchNorm2dImpl;

  torch::Tensor forward(const torch::Tensor& x);
};

/// BatchNorm2d of this rank's channels; weight, bias, running_mean and
/// running_var are [channels_r]. Communicates nothing.
class ParallelBatchNorm2d : public BatchNorm2d, public HasShards {
 public:
  ParallelBatchNorm2d(
      int64_t channels, const TensorParallel& parallel,
      const std::string& label);
};

}  // namespace echelon
