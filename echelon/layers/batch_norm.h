// Batch normalisation whose statistics somebody else may take.
#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/types.h>

#include <functional>

namespace echelon {

/// How a batch-normalisation layer computes its output instead of
/// module.forward(x), so that statistics can be taken over ranks.
using BatchNormFunction = std::function<torch::Tensor(
    torch::nn::BatchNorm2dImpl& module, const torch::Tensor& x)>;

/// torch::nn::BatchNorm2d; Network::set_batch_norm sets `function`. Of x in
/// bf16 or fp16 the statistics are those of float32; running ones stay in
/// float32, whatever the parameters are in.
class BatchNorm2d : public torch::nn::BatchNorm2dImpl {
 public:
  using BatchNorm2dImpl::BatchNorm2dImpl;

  torch::Tensor forward(const torch::Tensor& x);

  BatchNormFunction function;  // empty: the module's own forward
};

}  // namespace echelon
