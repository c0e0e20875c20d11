#include "echelon/optim/loss_scaler.h"

#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>
#include <tuple>
#include <utility>

#include "echelon/error.h"

namespace echelon {
namespace {

using torch::Tensor;

// Twice this is still a float32.
constexpr double kLargestScale = 0x1p126;

using ListKey =
    std::tuple<int, int, torch::Dtype>;  // device type, index, dtype

std::map<ListKey, std::vector<Tensor>>
lists_by_key(const std::vector<Tensor>& gradients) {
  std::map<ListKey, std::vector<Tensor>> lists;
  for (const auto& gradient : gradients) {
    if (!gradient.defined() || gradient.numel() == 0) continue;
    const auto device = gradient.device();
    lists[{static_cast<int>(device.type()), device.index(),
           gradient.scalar_type()}]
        .push_back(gradient);
  }
  return lists;
}

// Divides and looks in one pass; `found` becomes 1 where something is not
// finite.
void unscale_list(
    const std::vector<Tensor>& gradients, double scale, Tensor& found) {
  const auto& like = gradients.front();
  // The kernel's factor is a float32, too coarse for float64.
  const bool exact = like.scalar_type() == torch::kFloat64;
  const auto single =
      torch::TensorOptions().dtype(torch::kFloat32).device(like.device());
  auto here = torch::zeros({1}, single);
  const auto factor = torch::full({1}, exact ? 1.0 : 1.0 / scale, single);
  at::_amp_foreach_non_finite_check_and_unscale_(gradients, here, factor);
  if (exact) at::_foreach_div_(gradients, scale);
  found = at::maximum(found, here.sum().to(found.options()));
}

// Where the gradients are; the host if there are none.
torch::Device device_of(const std::vector<Tensor>& gradients) {
  for (const auto& gradient : gradients) {
    if (gradient.defined()) return gradient.device();
  }
  return torch::kCPU;
}

std::string text_of(double number) {
  std::ostringstream text;
  text.precision(9);
  text << number;
  return text.str();
}

}  // namespace

LossScaler::LossScaler(const PrecisionOptions& options, bool dynamic)
    : options_(options), dynamic_(dynamic) {
  if (dynamic) {
    scale_ = options.initial_loss_scale;
  } else {
    scale_ = options.loss_scale > 0 ? options.loss_scale : 1;
  }
  if (!(scale_ > 0) || scale_ > kLargestScale) {
    throw ConfigError(
        std::string("[precision] ") +
        (dynamic ? "initial_loss_scale=" : "loss_scale=") + text_of(scale_) +
        ": losses are multiplied by a number above 0 and up to 2^126");
  }
}

bool LossScaler::unscale(
    const std::vector<Tensor>& gradients, const SumOverRanks& sum) {
  const torch::NoGradGuard no_grad;
  auto found = torch::zeros(
      {}, torch::dtype(torch::kFloat64).device(device_of(gradients)));
  for (const auto& [_, list] : lists_by_key(gradients)) {
    unscale_list(list, scale_, found);
  }
  if (sum) sum(found);
  const bool finite = found.item<double>() == 0;
  if (finite) {
    overflows_ = 0;
    if (++good_steps_ < options_.loss_scale_growth) return true;
    good_steps_ = 0;
    if (dynamic_) scale_ = std::min(2 * scale_, kLargestScale);
    return true;
  }
  good_steps_ = 0;
  if (++overflows_ >= options_.max_overflows) fail();
  if (dynamic_) scale_ /= 2;
  return false;
}

void LossScaler::fail() const {
  throw NumericError(
      "gradients overflowed in " + std::to_string(overflows_) +
      " steps in a row (max_overflows), in the last with " +
      (dynamic_ ? "the loss scale halved down to "
                : "[precision] loss_scale = ") +
      text_of(scale_) +
      "; nothing was updated in them. Set [precision] compute = \"bf16\", "
      "which "
      "has float32's range, lower [optimizer] learning_rate, or set clip_norm");
}

LossScaler::State LossScaler::state() const {
  return {scale_, good_steps_, overflows_};
}

void LossScaler::load_state(const State& state) {
  if (!(state.scale > 0) || state.scale > kLargestScale ||
      state.good_steps < 0 || state.overflows < 0) {
    throw CheckpointError(
        "a loss scale of " + text_of(state.scale) + " after " +
        std::to_string(state.good_steps) + " steps and " +
        std::to_string(state.overflows) +
        " overflows is none that training leaves; use another checkpoint");
  }
  scale_ = state.scale;
  good_steps_ = state.good_steps;
  overflows_ = state.overflows;
}

}  // namespace echelon
