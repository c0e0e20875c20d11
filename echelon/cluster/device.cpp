#include "echelon/cluster/device.h"

#include "echelon/config/nearest.h"
#include "echelon/error.h"

namespace echelon {
namespace {

constexpr std::array<std::string_view, kPrecisions.size()> kNames = {
    "fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4"};

}  // namespace

std::string_view to_string(Precision precision) {
  return kNames[static_cast<size_t>(precision)];
}

Precision precision_from_name(std::string_view name) {
  std::string all;
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == name) return kPrecisions[i];
    all += (i == 0 ? "" : ", ") + std::string(kNames[i]);
  }
  throw ConfigError(
      "unknown precision \"" + std::string(name) + "\"" +
      config::did_you_mean(name, {kNames.begin(), kNames.end()}) +
      " (one of " + all + ")");
}

}  // namespace echelon
