#include "echelon/optim/autocast.h"

#include <ATen/autocast_mode.h>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

void check(torch::DeviceType device, torch::Dtype dtype) {
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

}  // namespace

Autocast::Autocast(torch::DeviceType device, torch::Dtype dtype, bool enabled)
    : device_(device) {
  check(device, dtype);
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

}  // namespace echelon
