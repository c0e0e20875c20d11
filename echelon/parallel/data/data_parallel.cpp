#include "echelon/parallel/data/data_parallel.h"

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cmath>
#include <set>
#include <string>

#include "echelon/error.h"

namespace echelon {

std::vector<int64_t>
split_by_shares(int64_t total, const std::vector<double>& shares) {
  double sum = 0;
  for (const double share : shares) sum += share;
  std::vector<int64_t> sizes;
  double reached = 0;
  int64_t begin = 0;
  for (const double share : shares) {
    reached += share;
    const int64_t end =
        std::llround(static_cast<double>(total) * (reached / sum));
    sizes.push_back(end - begin);
    begin = end;
  }
  return sizes;
}

namespace detail {

void check_options(const DataParallelOptions& options) {
  if (options.devices.empty()) {
    throw ConfigError("[data parallel] devices is empty; name at least one");
  }
  std::set<std::string> seen;
  for (const auto& device : options.devices) {
    if (device.is_cpu()) continue;
    if (!device.has_index() || !seen.insert(device.str()).second) {
      throw ConfigError(
          "[data parallel] device " + device.str() +
          " comes twice or has no number; one replica per GPU, as cuda:0, "
          "cuda:1 (several replicas on the CPU are fine)");
    }
  }
  double sum = 0;
  for (const double share : options.shares) {
    if (!(share >= 0) || !std::isfinite(share)) {
      throw ConfigError(
          "[data parallel] share " + std::to_string(share) +
          "; shares are numbers >= 0");
    }
    sum += share;
  }
  const bool given = !options.shares.empty();
  if (given && (options.shares.size() != options.devices.size() || sum <= 0)) {
    throw ConfigError(
        "[data parallel] " + std::to_string(options.shares.size()) +
        " shares that sum to " + std::to_string(sum) + " for " +
        std::to_string(options.devices.size()) +
        " devices; one share per device, not all of them 0");
  }
  if (options.threads < 0) {
    throw ConfigError(
        "[data parallel] threads=" + std::to_string(options.threads) +
        "; 0 shares the cores, or give a number");
  }
}

std::shared_ptr<torch::nn::Module>
clone_to(const torch::nn::Module& module, torch::Device device) {
  try {
    return module.clone(device);
  } catch (const c10::Error& error) {
    throw ConfigError(
        "[data parallel] " + module.name() +
        " cannot be copied to the replicas (" + error.what_without_backtrace() +
        "); derive it from torch::nn::Cloneable, or give a function that "
        "builds "
        "one");
  }
}

}  // namespace detail
}  // namespace echelon
