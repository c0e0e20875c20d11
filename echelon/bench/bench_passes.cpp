#include "echelon/bench/bench_passes.h"

#include <torch/nn.h>
#include <torch/types.h>
#include <torch/utils.h>

namespace echelon {
namespace {

namespace nn = torch::nn;

std::function<void()> pass_of(nn::Sequential network, const torch::Tensor& x) {
  return [network, x]() mutable {
    const torch::AutoGradMode gradients(true);
    network->zero_grad();
    network->forward(x).square().mean().backward();
  };
}

}  // namespace

std::function<void()> convolutions_pass(int64_t samples) {
  const nn::Sequential network(
      nn::Conv2d(nn::Conv2dOptions(1, 16, 3).padding(1)), nn::ReLU(),
      nn::MaxPool2d(2), nn::Conv2d(nn::Conv2dOptions(16, 32, 3).padding(1)),
      nn::ReLU(), nn::MaxPool2d(2), nn::Flatten(), nn::Linear(128, 10));
  return pass_of(network, torch::rand({samples, 1, 8, 8}));
}

std::function<void()> products_pass(int64_t samples) {
  nn::Sequential network;
  for (int layer = 0; layer < 8; ++layer) {
    network->push_back(nn::Linear(64, 64));
    network->push_back(nn::GELU());
  }
  return pass_of(network, torch::rand({samples, 64}));
}

}  // namespace echelon
