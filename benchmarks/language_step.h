// What the training steps of language models share: tokens in, losses and times
// out.
#pragma once

#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/optim/optimizer.h"
#include "echelon/text/format.h"

namespace echelon {

/// "tokens" of a safetensors file: int64 [batches, samples, length + 1].
inline torch::Tensor read_tokens(const std::string& path) {
  const safetensors::File file(path);
  const auto& info = file.at("tokens");
  return torch::from_blob(
             const_cast<std::byte*>(file.bytes(info).data()), info.shape,
             torch::kInt64)
      .clone();
}

/// AdamW without weight decay.
inline std::unique_ptr<Optimizer>
plain_adamw(NamedTensors parameters, double learning_rate) {
  ParameterGroup group;
  group.parameters = std::move(parameters);
  return make_optimizer(
      OptimizerOptions{
          .name = OptimizerKind::adamw, .learning_rate = learning_rate},
      std::vector<ParameterGroup>{std::move(group)});
}

inline NamedTensors named_parameters(const torch::nn::Module& module) {
  NamedTensors all;
  for (const auto& item : module.named_parameters()) {
    all.emplace_back(item.key(), item.value());
  }
  return all;
}

struct StepTimes {
  torch::Tensor losses;         // [steps], those that warm up too
  std::vector<double> seconds;  // without them
};

/// Runs `warm_up` and then `steps` steps over tokens[0], tokens[1], … in turn.
///
///   step   tokens [samples, length + 1] -> the loss
///   fence  returns when all ranks, or the device, have done what was asked
inline StepTimes time_steps(
    const torch::Tensor& tokens, int64_t warm_up, int64_t steps,
    const std::function<torch::Tensor(const torch::Tensor&)>& step,
    const std::function<void()>& fence) {
  using Clock = std::chrono::steady_clock;
  StepTimes times;
  std::vector<torch::Tensor> losses;
  for (int64_t i = 0; i < warm_up + steps; ++i) {
    const torch::Tensor batch = tokens[i % tokens.size(0)];
    fence();
    const auto start = Clock::now();
    losses.push_back(step(batch).detach());
    fence();
    if (i < warm_up) continue;
    times.seconds.push_back(
        std::chrono::duration<double>(Clock::now() - start).count());
  }
  times.losses = torch::stack(losses).to(torch::kFloat64);
  return times;
}

/// JSON; what is not finite is null.
inline std::string json_list(const std::vector<double>& values) {
  const auto number = [](double value) {
    return std::isfinite(value) ? format("{:.9g}", value) : "null";
  };
  return format("[{}]", join(values, ", ", number));
}

inline std::string json_list(const torch::Tensor& values) {
  const auto own = values.cpu().contiguous();
  const double* first = own.data_ptr<double>();
  return json_list(std::vector<double>(first, first + own.numel()));
}

}  // namespace echelon
