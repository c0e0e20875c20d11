// Batch normalisation over the batches of all ranks, on any device.
//
// The statistics are those of the global batch, also when ranks have different
// numbers of samples. Gradients of the input are exact; those of weight and
// bias are this rank's part, as for any parameter under data parallelism. One
// all_gather of 2C + 1 numbers in forward, one all_reduce of 2C in backward.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/types.h>

#include <vector>

#include "echelon/comm/group.h"

namespace echelon {

/// What torch::batch_norm computes in training, over the group's batch.
///
///   input         [N, C, …]  N may differ between ranks, and be 0 on some
///   weight, bias  [C] or undefined
///   running_mean, running_var  [C] or undefined (float32 beside an input of
///                 float16 or bfloat16, whatever weight is); updated in place:
///                 r <- (1 - momentum) * r + momentum * statistic, the variance
///                 unbiased, on every rank alike
///   returns       [N, C, …]
///
/// Every rank of the group calls this, and its backward. Cannot be
/// differentiated twice. Throws DataError unless the ranks together have more
/// than one value per channel.
torch::Tensor sync_batch_norm(
    const torch::Tensor& input, const torch::Tensor& weight,
    const torch::Tensor& bias, const torch::Tensor& running_mean,
    const torch::Tensor& running_var, double momentum, double eps,
    const Group& group);

/// What `module.forward(input)` computes, over the group's batch while the
/// module is in training; for code that calls its BatchNorm itself, as
/// Network::set_batch_norm lets it.
torch::Tensor sync_batch_norm(
    torch::nn::BatchNorm1dImpl& module, const torch::Tensor& input,
    const Group& group);
torch::Tensor sync_batch_norm(
    torch::nn::BatchNorm2dImpl& module, const torch::Tensor& input,
    const Group& group);
torch::Tensor sync_batch_norm(
    torch::nn::BatchNorm3dImpl& module, const torch::Tensor& input,
    const Group& group);

/// A BatchNorm of any number of dimensions, for models that are built with it.
/// Parameter and buffer names, options and evaluation are those of
/// torch::nn::BatchNorm; `momentum` none is the cumulative average.
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

/// What convert_sync_batch_norm did; undone when this is destroyed.
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
/// normalises over the group's batch when it is in training mode. They stay
/// what and where they are, so this works for any user's module, also for one
/// that holds them as members or in a Sequential; names, checkpoints and
/// evaluation do not change. In a group of size 1 nothing changes.
///
/// How: torch::nn's modules call at::batch_norm, and an autograd kernel of that
/// operator recognises the running mean (or weight) of a converted module.
/// Limits: copies made by clone() are not converted; a BatchNorm with neither
/// running statistics nor weight cannot be recognised (ConfigError); converting
/// again replaces the group.
[[nodiscard]] ConvertedBatchNorms
convert_sync_batch_norm(torch::nn::Module& module, const Group& group);

}  // namespace echelon
