#include "echelon/cluster/device.h"

#include <algorithm>

#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/nearest.h"

namespace echelon::cluster {
namespace {

constexpr std::array<std::string_view, kPrecisions.size()> kNames = {
    "fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4"};

constexpr std::array<std::string_view, kProductKinds.size()> kProductNames = {
    "product",
    "convolution",
    "convolution inputs",
    "convolution weights",
    "attention",
    "attention gradients"};

// Where `name` is in `names`.
template <size_t kSize>
size_t find_name(
    const char* what, std::string_view name,
    const std::array<std::string_view, kSize>& names) {
  const auto at = std::ranges::find(names, name);
  if (at != names.end()) return static_cast<size_t>(at - names.begin());
  throw ConfigError(format(
      "unknown {} \"{}\"{} (one of {})", what, name,
      config::did_you_mean(name, {names.begin(), names.end()}),
      join(names, ", ")));
}

}  // namespace

std::string_view to_string(Precision precision) {
  return kNames[static_cast<size_t>(precision)];
}

Precision precision_from_name(std::string_view name) {
  return kPrecisions[find_name("precision", name, kNames)];
}

std::string_view to_string(ProductKind kind) {
  return kProductNames[static_cast<size_t>(kind)];
}

ProductKind product_kind_from_name(std::string_view name) {
  return kProductKinds[find_name("kind of product", name, kProductNames)];
}

double product_flops(ProductKind kind, double m, double n, double k) {
  const double once = 2 * m * n * k;
  if (kind == ProductKind::attention) return 2 * once;
  return kind == ProductKind::attention_gradients ? 5 * once : once;
}

}  // namespace echelon::cluster
