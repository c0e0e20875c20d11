// Batch normalisation over the batches of all ranks, on any device.
//
//   auto converted = convert_sync_batch_norm(*net, world.group());
//
// The statistics are those of the global batch, even if ranks have different
// numbers of samples. Gradients of the input are exact; those of weight and
// bias are this rank's term of the sum, as for any parameter under data
// parallelism. Forward costs one all_gather of 2C + 1 numbers, backward one
// all_reduce of 2C.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/types.h>

#include <vector>

#include "echelon/comm/group.h"

namespace echelon {

/// Computes torch::batch_norm in training mode over the group's batch.
///
///   input         [N, C, …]  N may differ between ranks, and be 0 on some
///   weight, bias  [C] or undefined
///   running_mean, running_var  [C] or undefined; float32 for an input of
///                 float16 or bfloat16, whatever weight is. Updated in place,
///                 equally on every rank, with the unbiased variance:
///                 r <- (1 - momentum) * r + momentum * statistic
///   returns       [N, C, …]
///
/// Every rank of the group calls this, and its backward. Cannot be
/// differentiated twice. Throws ConfigError for an input of fewer than two
/// dimensions, and DataError unless the ranks together have more than one value
/// per channel.
torch::Tensor sync_batch_norm(
    const torch::Tensor& input, const torch::Tensor& weight,
    const torch::Tensor& bias, const torch::Tensor& running_mean,
    const torch::Tensor& running_var, double momentum, double eps,
    const Group& group);

/// A BatchNorm module for inputs of any number of dimensions. Names of
/// parameters and buffers, options and evaluation are those of
/// torch::nn::BatchNorm; without `momentum` the running statistics are
/// cumulative averages.
class SyncBatchNormImpl
    : public torch::nn::NormImplBase<
          0, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, Group group);

  torch::Tensor forward(const torch::Tensor& input);
  void pretty_print(std::ostream& stream) const override;

 protected:
  void _check_input_dim(const torch::Tensor& input) override;

 private:
  Group group_;
};
TORCH_MODULE(SyncBatchNorm);

/// Keeps modules converted by convert_sync_batch_norm; its destructor undoes
/// that.
class ConvertedBatchNorms {
 public:
  ConvertedBatchNorms() = default;
  explicit ConvertedBatchNorms(std::vector<torch::Tensor> keys);
  ConvertedBatchNorms(ConvertedBatchNorms&&) = default;
  ConvertedBatchNorms& operator=(ConvertedBatchNorms&& other) noexcept;
  ~ConvertedBatchNorms();

  size_t size() const { return keys_.size(); }

 private:
  std::vector<torch::Tensor> keys_;
};

/// While the result lives, every torch::nn::BatchNorm1d, 2d and 3d in `module`
/// normalises over the group's batch when it is in training mode. The modules
/// are not replaced, so this works for any user's module; names, checkpoints
/// and evaluation do not change. In a group of size 1 nothing changes.
///
/// torch::nn's modules call at::batch_norm, and an autograd kernel of that
/// operator recognises the running mean (or weight) of a converted module.
/// Hence the limits: copies made by clone() are not converted; a BatchNorm with
/// neither running statistics nor weight cannot be recognised (ConfigError);
/// converting again replaces the group.
[[nodiscard]] ConvertedBatchNorms
convert_sync_batch_norm(torch::nn::Module& module, const Group& group);

}  // namespace echelon
