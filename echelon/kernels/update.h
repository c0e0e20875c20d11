// Updates of parameters by SGD and Adam, for GPUs: one pass over parameters,
// gradients and state for many tensors at once, in which gradients are also
// multiplied by a factor (clipping, the inverse of a loss scale), or nothing is
// written. They are operators of LibTorch's dispatcher, so counts and profiles
// see each as one.
//
// Tensors are float32, bfloat16 or float16; each number is computed in float32
// and rounded once. The arithmetic does not depend on where the rate, the
// factor and the flag come from, so a captured step gives the bits of an eager
// one.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace echelon::kernels {

/// Tensors of a launch, at most, and elements of a block.
inline constexpr int kUpdateTensors = 64;
inline constexpr int64_t kUpdateElements = 4096;

/// Whether the functions below update tensors like `parameter`: on a GPU that
/// has the kernels (uses_kernels), or meta tensors that stand for such.
bool takes_update(const torch::Tensor& parameter);

/// Lists of equal length. The tensors of each place are dense, in one memory
/// order; all tensors are of one dtype and on one device.
struct UpdatedLists {
  const std::vector<torch::Tensor>& parameters;
  const std::vector<torch::Tensor>& gradients;  // they stay as they are
};

/// What differs from step to step. Tensors are float32 scalars on the device of
/// the parameters.
struct UpdateStep {
  double rate = 0;  // rounded to float32
  std::optional<torch::Tensor> rate_on_device = std::nullopt;  // before `rate`
  std::optional<torch::Tensor> factor = std::nullopt;  // of gradients; none: 1
  std::optional<torch::Tensor> skip = std::nullopt;    // not 0: nothing changes
};

struct SgdSettings {
  double momentum = 0;
  double weight_decay = 0;
  bool nesterov = false;
};

/// g += wd p;  m = momentum m + g;  p -= rate m, with nesterov
/// p -= rate (g + momentum m).
///
///   momenta  m; empty without momentum
void update_by_sgd(
    const UpdatedLists& lists, const std::vector<torch::Tensor>& momenta,
    const UpdateStep& step, const SgdSettings& settings);

struct AdamSettings {
  double beta1 = 0, beta2 = 0, epsilon = 0, weight_decay = 0;
  bool decoupled = false;  // AdamW
};

/// Sources: Kingma and Ba, 2014, arXiv:1412.6980; Loshchilov and Hutter, 2017,
/// arXiv:1711.05101.
///
///   steps  the number of this step, from 1, of each tensor: float32 scalars
void update_by_adam(
    const UpdatedLists& lists, const std::vector<torch::Tensor>& means,
    const std::vector<torch::Tensor>& squares,
    const std::vector<torch::Tensor>& steps, const UpdateStep& step,
    const AdamSettings& settings);

}  // namespace echelon::kernels
