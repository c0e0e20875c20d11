#include "echelon/train/bench_jitter.h"

#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <vector>

#include "echelon/train/bench_fits.h"

namespace echelon {
namespace {

namespace nn = torch::nn;
using Clock = std::chrono::steady_clock;

constexpr int64_t kSteps = 20;
constexpr int64_t kRounds = 25;

std::function<double()> timed(std::function<void()> call) {
  return [call = std::move(call)] {
    const auto begin = Clock::now();
    call();
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
}

// Forwards and backwards: half a millisecond on a core of today.
std::function<void()> pass_of(nn::Sequential network, const torch::Tensor& x) {
  return [network, x]() mutable {
    const torch::AutoGradMode gradients(true);
    network->zero_grad();
    network->forward(x).square().mean().backward();
  };
}

nn::Sequential convolutions() {
  return nn::Sequential(
      nn::Conv2d(nn::Conv2dOptions(1, 16, 3).padding(1)), nn::ReLU(),
      nn::MaxPool2d(2), nn::Conv2d(nn::Conv2dOptions(16, 32, 3).padding(1)),
      nn::ReLU(), nn::MaxPool2d(2), nn::Flatten(), nn::Linear(128, 10));
}

nn::Sequential products() {
  nn::Sequential network;
  for (int layer = 0; layer < 8; ++layer) {
    network->push_back(nn::Linear(64, 64));
    network->push_back(nn::GELU());
  }
  return network;
}

}  // namespace

double bench_jitter(BenchMeter& meter, World& world) {
  if (world.size() == 1) return 0;
  const std::vector<std::function<void()>> passes = {
      pass_of(convolutions(), torch::rand({32, 1, 8, 8})),
      pass_of(products(), torch::rand({32, 64}))};
  const torch::Tensor number = torch::zeros({1});
  const auto meet = [&] { world.group().all_reduce(number).wait(); };
  std::vector<std::function<double()>> calls = {timed(meet)};
  for (const auto& pass : passes) {
    calls.push_back(timed(pass));
    calls.push_back(timed([pass, meet] {
      pass();
      meet();
    }));
  }
  const auto rounds = meter.rounds_of_own_seconds(calls, kSteps, kRounds);
  double sum = 0;
  for (size_t pass = 0; pass < passes.size(); ++pass) {
    std::vector<double> alone, waiting;
    for (const auto& seconds : rounds) {
      alone.push_back(seconds[1 + 2 * pass]);
      waiting.push_back(seconds[2 + 2 * pass] - alone.back() - seconds[0]);
    }
    sum += fit_jitter(world.size(), median(alone), median(waiting));
  }
  return sum / static_cast<double>(passes.size());
}

}  // namespace echelon
