// The test of truth: a parallel run against the run on one device, tensor by
// tensor, by name. Every strategy and combination uses this.
//
//   Record expected, actual;
//   for each step: … backward … ; record.step(module, loss); optimizer.step();
//   record.end(module);
//   expect_parity(expected, actual, kRounding);
//
// A strategy that cuts tensors gathers them first and calls the overloads that
// take named tensors.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

namespace echelon::parity {

/// Relative, in float64: what another order of sums may change in a few steps.
constexpr double kRounding = 1e-12;
/// The order of sums is unchanged: the same bits.
constexpr double kExact = 0.0;

using NamedTensors = std::map<std::string, torch::Tensor>;

inline NamedTensors gradients_of(const torch::nn::Module& module) {
  NamedTensors gradients;
  for (const auto& item : module.named_parameters()) {
    gradients[item.key()] = item.value().grad();
  }
  return gradients;
}

/// Everything that a run computed. Copies; undefined gradients stay undefined.
struct Record {
  std::vector<double> losses;           // one per step
  std::vector<NamedTensors> gradients;  // of each step
  NamedTensors parameters;              // at the end
  NamedTensors buffers;                 // at the end

  void step(const NamedTensors& step_gradients, double loss) {
    losses.push_back(loss);
    auto& copies = gradients.emplace_back();
    for (const auto& [name, gradient] : step_gradients) {
      copies[name] = gradient.defined() ? gradient.clone() : gradient;
    }
  }

  void step(const torch::nn::Module& module, double loss) {
    step(gradients_of(module), loss);
  }

  void end(const torch::nn::Module& module) {
    for (const auto& item : module.named_parameters()) {
      parameters[item.key()] = item.value().detach().clone();
    }
    for (const auto& item : module.named_buffers()) {
      buffers[item.key()] = item.value().detach().clone();
    }
  }
};

namespace detail {

inline double largest(const torch::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0) return 0.0;
  return tensor.detach().to(torch::kFloat64).abs().max().item<double>();
}

// A tensor that should vanish is compared on the scale of the others.
inline double floor_of(const NamedTensors& tensors) {
  double largest_of_all = 0.0;
  for (const auto& [_, tensor] : tensors) {
    largest_of_all = std::max(largest_of_all, largest(tensor));
  }
  return 1e-2 * largest_of_all;
}

inline void expect_close(
    const std::string& what, const torch::Tensor& expected,
    const torch::Tensor& actual, double floor, double tolerance) {
  ASSERT_EQ(expected.defined(), actual.defined()) << what;
  if (!expected.defined()) return;
  ASSERT_EQ(expected.sizes(), actual.sizes()) << what;
  const torch::Tensor a = actual.to(torch::kFloat64);
  const torch::Tensor e = expected.to(torch::kFloat64);
  EXPECT_TRUE(a.isfinite().all().item<bool>()) << what << " is not finite";
  const double scale = std::max(largest(e), floor);
  EXPECT_LE(largest(a - e), tolerance * scale)
      << what << ": largest difference " << largest(a - e) << ", largest value "
      << scale;
}

}  // namespace detail

inline void expect_same(
    const std::string& place, const NamedTensors& expected,
    const NamedTensors& actual, double tolerance) {
  const double floor = detail::floor_of(expected);
  for (const auto& [name, tensor] : expected) {
    const auto found = actual.find(name);
    ASSERT_NE(found, actual.end()) << place << " " << name << " is missing";
    detail::expect_close(
        place + " " + name, tensor, found->second, floor, tolerance);
  }
  EXPECT_EQ(expected.size(), actual.size()) << place;
}

/// Losses, all gradients of all steps, all parameters and buffers at the end:
/// names, which are defined, shapes, and values within `tolerance` of the
/// tensor's largest value.
inline void
expect_parity(const Record& expected, const Record& actual, double tolerance) {
  ASSERT_EQ(expected.losses.size(), actual.losses.size());
  for (size_t step = 0; step < expected.losses.size(); ++step) {
    const std::string place = "step " + std::to_string(step);
    EXPECT_NEAR(
        expected.losses[step], actual.losses[step],
        tolerance * std::abs(expected.losses[step]))
        << place << " loss";
    expect_same(
        place + " gradient of", expected.gradients[step],
        actual.gradients[step], tolerance);
  }
  expect_same("parameter", expected.parameters, actual.parameters, tolerance);
  expect_same("buffer", expected.buffers, actual.buffers, tolerance);
}

/// Normal numbers in float64, the same for a seed on every thread.
inline torch::Tensor random(at::IntArrayRef shape, uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed + 1);
  return torch::empty(shape, torch::kFloat64).normal_(0, 1, generator);
}

/// Parameters in float64 that depend on the seed alone.
inline void give_values(torch::nn::Module& module, uint64_t seed) {
  torch::NoGradGuard no_grad;
  module.to(torch::kFloat64);
  for (auto& item : module.named_parameters()) {
    item.value().copy_(random(item.value().sizes(), seed++) * 0.3);
  }
}

}  // namespace echelon::parity
