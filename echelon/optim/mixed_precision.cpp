#include "echelon/optim/mixed_precision.h"

#include <ATen/autocast_mode.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

void check_autocast(torch::DeviceType device, torch::Dtype dtype) {
  if (!at::autocast::is_autocast_available(device)) {
    throw ConfigError(format(
        "[autocast] there is none for the device \"{}\"; use torch::kCPU or "
        "torch::kCUDA",
        c10::DeviceTypeName(device, /*lower_case=*/true)));
  }
  if (dtype != torch::kBFloat16 && dtype != torch::kHalf) {
    throw ConfigError(format(
        "[autocast] {} is no dtype of low precision; use torch::kBFloat16 or "
        "torch::kHalf",
        c10::toString(dtype)));
  }
}

using torch::Tensor;

// Twice this scale is still a float32.
constexpr double kLargestScale = 0x1p126;

// Divides and checks in one pass; `found` becomes 1 where a gradient is not
// finite.
void unscale_list(
    const std::vector<Tensor>& gradients, double scale, Tensor& found) {
  const auto& like = gradients.front();
  // The kernel's factor is a float32, too coarse for float64.
  const bool exact = like.scalar_type() == torch::kFloat64;
  const auto single =
      torch::TensorOptions().dtype(torch::kFloat32).device(like.device());
  auto found_here = torch::zeros({1}, single);
  const auto factor = torch::full({1}, exact ? 1.0 : 1.0 / scale, single);
  at::_amp_foreach_non_finite_check_and_unscale_(gradients, found_here, factor);
  if (exact) at::_foreach_div_(gradients, scale);
  found = at::maximum(found, found_here.sum().to(found.options()));
}

// The device of the gradients; the CPU if there are none.
torch::Device device_of(const std::vector<Tensor>& gradients) {
  for (const auto& gradient : gradients) {
    if (gradient.defined()) return gradient.device();
  }
  return torch::kCPU;
}

}  // namespace

Autocast::Autocast(torch::DeviceType device, torch::Dtype dtype, bool enabled)
    : device_(device) {
  check_autocast(device, dtype);
  outer_dtype_ = at::autocast::get_autocast_dtype(device);
  outer_enabled_ = at::autocast::is_autocast_enabled(device);
  at::autocast::set_autocast_enabled(device, enabled);
  at::autocast::set_autocast_dtype(device, dtype);
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, outer_enabled_);
  at::autocast::set_autocast_dtype(device_, outer_dtype_);
}

LossScaler::LossScaler(const PrecisionOptions& options, bool dynamic)
    : options_(options), dynamic_(dynamic) {
  if (dynamic) {
    state_.scale = options.initial_loss_scale;
  } else {
    state_.scale = options.loss_scale > 0 ? options.loss_scale : 1;
  }
  if (!(state_.scale > 0) || state_.scale > kLargestScale) {
    throw ConfigError(format(
        "[precision] {}={:.9g}: losses are multiplied by a number above 0 and "
        "up to 2^126",
        dynamic ? "initial_loss_scale" : "loss_scale", state_.scale));
  }
}

bool LossScaler::unscale(
    const std::vector<Tensor>& gradients, const SumOverRanks& sum) {
  const torch::NoGradGuard no_grad;
  auto found = torch::zeros(
      {}, torch::dtype(torch::kFloat64).device(device_of(gradients)));
  for (auto& [_, list] : detail::by_kind(gradients)) {
    unscale_list(list, state_.scale, found);
  }
  if (sum) sum(found);
  const bool finite = found.item<double>() == 0;
  if (finite) {
    state_.overflows = 0;
    if (++state_.good_steps < options_.loss_scale_growth) return true;
    state_.good_steps = 0;
    if (dynamic_) state_.scale = std::min(2 * state_.scale, kLargestScale);
    return true;
  }
  state_.good_steps = 0;
  if (++state_.overflows >= options_.max_overflows) fail();
  if (dynamic_) state_.scale /= 2;
  return false;
}

void LossScaler::fail() const {
  throw NumericError(format(
      "gradients overflowed in {} steps in a row (max_overflows), in the last "
      "with {}{:.9g}; nothing was updated in them. Set [precision] compute = "
      "\"bf16\", which has float32's range, lower [optimizer] learning_rate, "
      "or set clip_norm",
      state_.overflows,
      dynamic_ ? "the loss scale halved down to " : "[precision] loss_scale = ",
      state_.scale));
}

void LossScaler::load_state(const State& state) {
  if (!(state.scale > 0) || state.scale > kLargestScale ||
      state.good_steps < 0 || state.overflows < 0) {
    throw CheckpointError(format(
        "a loss scale of {:.9g} after {} steps and {} overflows is none that "
        "training leaves; use another checkpoint",
        state.scale, state.good_steps, state.overflows));
  }
  state_ = state;
}

}  // namespace echelon
