// Batch normalisation whose statistics may be computed over ranks.
#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/types.h>

#include <functional>

namespace echelon {

/// How a batch-normalisation layer computes its output instead of
/// module.forward(x), so that statistics can be taken over ranks.
using BatchNormFunction = std::function<torch::Tensor(
    torch::nn::BatchNorm2dImpl& module, const torch::Tensor& x)>;

/// torch::nn::BatchNorm2d; Network::set_batch_norm sets `function`. For x in
/// bf16 or fp16 the statistics are computed in float32. Running statistics stay
/// in float32, whatever the dtype of the parameters.
class BatchNorm2d : public torch::nn::BatchNorm2dImpl {
 public:
  using BatchNorm2dImpl::BatchNorm2dImpl;

  torch::Tensor forward(const torch::Tensor& x);

  BatchNormFunction function;  // empty: the module's own forward
};

}  // namespace echelon
