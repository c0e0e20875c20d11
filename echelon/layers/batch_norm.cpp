#include "echelon/layers/batch_norm.h"

#include <torch/nn/module.h>
#include <torch/types.h>

#include "echelon/error.h"
#include "echelon/layers/low_precision.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

void check_running(const torch::nn::BatchNorm2dImpl& module) {
  const auto& running = module.running_mean;
  if (!running.defined() || running.scalar_type() == torch::kFloat32) return;
  throw ConfigError(format(
      "[batch norm] running statistics are in {}, which cannot hold their "
      "small "
      "steps; convert the parameters alone, and leave buffers in float32",
      c10::toString(running.scalar_type())));
}

// The kernels take x in low precision with float32 parameters and statistics.
torch::Tensor
normalise(torch::nn::BatchNorm2dImpl& module, const torch::Tensor& x) {
  check_running(module);
  const bool training = module.is_training();
  double momentum = module.options.momentum().value_or(0.0);
  if (training && module.num_batches_tracked.defined()) {
    module.num_batches_tracked += 1;
    if (!module.options.momentum().has_value()) {
      momentum = 1.0 / module.num_batches_tracked.item<double>();
    }
  }
  return torch::batch_norm(
      x, for_sums(module.weight), for_sums(module.bias), module.running_mean,
      module.running_var, training || !module.options.track_running_stats(),
      momentum, module.options.eps(), /*cudnn_enabled=*/true);
}

}  // namespace

torch::Tensor BatchNorm2d::forward(const torch::Tensor& x) {
  if (function) return function(*this, x);
  return is_low_precision(x.scalar_type()) ? normalise(*this, x)
                                           : BatchNorm2dImpl::forward(x);
}

}  // namespace echelon
