// Convolutions and batch normalisation whose channels are cut over a
// tensor-parallel group.
//
// Between two convolutions each rank has the images of its channels, an even
// part of them, and everything that treats channels apart (batch normalisation,
// ReLU, pooling, residual sums) works on those alone. A convolution mixes all
// channels, so it is cut like a matrix: by its outputs, which needs all inputs,
// or by its inputs, whose results are sums over the ranks.
//
// Source: cut by channels: Dryden et al., "Channel and Filter Parallelism for
// Large-Scale CNN Training", 2019.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>

#include "echelon/layers/batch_norm.h"
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

/// The channels of an image between layers: all on every rank, or part
/// even_range of them on each.
enum class Channels { replicated, cut };

/// Throws ConfigError, with the numbers, when some rank would have none.
void check_channels(
    const std::string& label, int64_t channels, const TensorParallel& parallel);

/// A convolution with padding kernel / 2.
///
///   from        to          is cut by               sends, forward | backward
///   replicated  cut         outputs                 nothing | all-reduce
///   cut         replicated  inputs                  all-reduce | nothing
///   replicated  replicated  outputs                 all-gather | all-reduce
///   cut         cut         inputs, when its results are smaller than its
///                           input: reduce-scatter | all-gather; else outputs:
///                           all-gather | reduce-scatter
///
/// weight [out_r, in, kernel, kernel] or [out, in_r, kernel, kernel]; bias
/// [out_r] (whole where the result of a cut input is replicated). First values
/// are uniform within 1 / sqrt(in * kernel * kernel), by initialize_shards.
class ParallelConv2d : public ShardedModule {
 public:
  /// Throws ConfigError as check_channels for what is cut.
  ParallelConv2d(
      const ConvShape& shape, TensorParallel parallel, std::string label,
      Channels from, Channels to);

  /// x [batch, in or in_r, h, w] -> [batch, out or out_r, ceil(h / stride), …].
  torch::Tensor forward(const torch::Tensor& x);

  bool cuts_inputs() const { return cuts_inputs_; }

  torch::Tensor weight;
  torch::Tensor bias;  // undefined without

 private:
  void pretty_print(std::ostream& stream) const override;
  torch::Tensor
  product(const torch::Tensor& x, const torch::Tensor& bias_of_all) const;

  ConvShape shape_;
  TensorParallel parallel_;
  std::string label_;
  Channels from_;
  Channels to_;
  bool cuts_inputs_;
};

/// BatchNorm2d of this rank's channels; weight, bias, running_mean and
/// running_var are [channels_r]. Sends nothing.
class ParallelBatchNorm2d : public BatchNorm2d, public HasShards {
 public:
  ParallelBatchNorm2d(
      int64_t channels, const TensorParallel& parallel,
      const std::string& label);
};

}  // namespace echelon
