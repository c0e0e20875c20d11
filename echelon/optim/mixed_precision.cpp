#include "echelon/optim/mixed_precision.h"

#include <ATen/autocast_mode.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <limits>

#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

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

// Divides and checks in one pass. Returns 1 where a gradient is not finite.
Tensor unscale_list(const std::vector<Tensor>& gradients, const Tensor& scale) {
  const auto& like = gradients.front();
  const auto own = detail::moved(scale, like.device(), scale.scalar_type());
  // The kernel's factor is a float32, too coarse for float64.
  const bool exact = like.scalar_type() == torch::kFloat64;
  const auto single =
      torch::TensorOptions().dtype(torch::kFloat32).device(like.device());
  auto found = torch::zeros({1}, single);
  const auto factor = exact ? torch::ones({1}, single)
                            : own.reciprocal().to(torch::kFloat32).reshape({1});
  at::_amp_foreach_non_finite_check_and_unscale_(gradients, found, factor);
  if (exact) at::_foreach_div_(gradients, own);
  return found.squeeze(0);
}

// Checks alone. Returns 1 where a gradient is not finite, and so is the largest
// magnitude.
Tensor check_list(const std::vector<Tensor>& gradients, const Tensor&) {
  const auto largest = at::stack(
      at::_foreach_norm(gradients, std::numeric_limits<double>::infinity()));
  return at::isfinite(largest).all().logical_not_();
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
  State state;
  if (dynamic) {
    state.scale = options.initial_loss_scale;
  } else {
    state.scale = options.loss_scale > 0 ? options.loss_scale : 1;
  }
  if (!(state.scale > 0) || state.scale > kLargestScale) {
    throw ConfigError(format(
        "[precision] {}={:.9g}: losses are multiplied by a number above 0 and "
        "up to 2^126",
        dynamic ? "initial_loss_scale" : "loss_scale", state.scale));
  }
  active_ = dynamic || state.scale != 1;
  load_state(state);
}

// `look` says of gradients of one kind whether one of them is not finite.
Tensor LossScaler::next(
    const std::vector<Tensor>& gradients, const SumOverRanks& sum,
    const Tensor& skip, Look look) {
  const torch::NoGradGuard no_grad;
  const torch::Device device = device_of(gradients);
  if (state_.device() != device) {
    state_ = detail::moved(state_, device, torch::kFloat64);
  }
  const Tensor scale = state_[0].clone();
  auto found = torch::zeros({}, scale.options());
  for (auto& [_, list] : detail::by_kind(gradients)) {
    const auto here = look(list, scale);
    found = at::maximum(found, detail::moved(here, device, torch::kFloat64));
  }
  if (sum) sum(found);
  const Tensor overflowed = found.gt(0).to(torch::kFloat64);
  const Tensor overflows = (state_[2] + 1) * overflowed;
  Tensor good_steps = (state_[1] + 1) * (1 - overflowed);
  const Tensor grows =
      good_steps.ge(static_cast<double>(options_.loss_scale_growth))
          .to(torch::kFloat64);
  good_steps *= 1 - grows;
  Tensor next = scale;
  if (dynamic_) {
    next =
        (scale * (1 + grows)).clamp_max_(kLargestScale) * (1 - overflowed / 2);
  }
  Tensor after = at::stack({next, good_steps, overflows});
  if (skip.defined()) {
    const Tensor kept = detail::moved(skip, device, torch::kFloat64).ne(0);
    after = at::where(kept, state_, after);
  }
  state_.copy_(after);  // in place, where a CUDA graph reads it
  return at::stack({overflowed, scale, state_[2]});
}

Tensor LossScaler::check_on_device(
    const std::vector<Tensor>& gradients, const SumOverRanks& sum,
    const Tensor& skip) {
  return next(gradients, sum, skip, &check_list);
}

bool LossScaler::unscale(
    const std::vector<Tensor>& gradients, const SumOverRanks& sum) {
  const Tensor numbers =
      next(gradients, sum, {}, &unscale_list).to(torch::kCPU).contiguous();
  const auto* values = numbers.const_data_ptr<double>();
  check(values[1], values[2]);
  return values[0] == 0;
}

void LossScaler::check(double scale, double overflows) const {
  if (overflows < static_cast<double>(options_.max_overflows)) return;
  throw NumericError(format(
      "gradients overflowed in {} in a row (max_overflows), in the last "
      "with {}{:.9g}; nothing was updated in them. Set [precision] compute = "
      "\"bf16\", which has float32's range, lower [optimizer] learning_rate, "
      "or set clip_norm",
      counted(static_cast<int64_t>(overflows), "step"),
      dynamic_ ? "the loss scale halved down to " : "[precision] loss_scale = ",
      scale));
}

LossScaler::State LossScaler::state() const {
  const Tensor numbers = state_.to(torch::kCPU).contiguous();
  const auto* values = numbers.const_data_ptr<double>();
  return {
      .scale = values[0],
      .good_steps = static_cast<int64_t>(values[1]),
      .overflows = static_cast<int64_t>(values[2])};
}

void LossScaler::load_state(const State& state) {
  if (!(state.scale > 0) || state.scale > kLargestScale ||
      state.good_steps < 0 || state.overflows < 0) {
    throw CheckpointError(format(
        "a loss scale of {:.9g} after {} and {} is none that "
        "training leaves; use another checkpoint",
        state.scale, counted(state.good_steps, "step"),
        counted(state.overflows, "overflow")));
  }
  state_ = torch::tensor(
      {state.scale, static_cast<double>(state.good_steps),
       static_cast<double>(state.overflows)},
      torch::kFloat64);
}

}  // namespace echelon
