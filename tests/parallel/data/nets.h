// Small networks that the data-parallel tests train.
#pragma once

#include <torch/torch.h>

namespace echelon::nets {

/// [batch, 6] -> [batch, 4]
struct MlpImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    return fc3(torch::tanh(fc2(torch::tanh(fc1(x.flatten(1))))));
  }
  torch::nn::Linear fc1 = register_module("fc1", torch::nn::Linear(6, 16));
  torch::nn::Linear fc2 = register_module("fc2", torch::nn::Linear(16, 16));
  torch::nn::Linear fc3 = register_module("fc3", torch::nn::Linear(16, 4));
};
TORCH_MODULE(Mlp);

/// [batch, 6] -> [batch, 4]; the 6 numbers are an image of 1x2x3
struct ConvImpl : torch::nn::Module {
  ConvImpl() {
    register_module("conv1", conv1);
    register_module("conv2", conv2);
    register_module("fc", fc);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto h = torch::relu(conv1(x.view({-1, 1, 2, 3})));
    return fc(torch::relu(conv2(h)).flatten(1));
  }
  torch::nn::Conv2d conv1{torch::nn::Conv2dOptions(1, 5, 3).padding(1)};
  torch::nn::Conv2d conv2{torch::nn::Conv2dOptions(5, 4, 3).padding(1)};
  torch::nn::Linear fc{24, 4};
};
TORCH_MODULE(Conv);

/// One layer twice, registered under two names, and a weight used transposed.
struct SharedImpl : torch::nn::Module {
  SharedImpl() {
    register_module("first", layer);
    register_module("second", layer);
    in = register_parameter("in", torch::randn({6, 8}));
    out = register_parameter("out", torch::randn({8, 4}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto h = torch::tanh(layer(torch::tanh(layer(x.flatten(1).mm(in)))));
    h = torch::tanh(h.mm(in.t()).mm(in));
    return h.mm(out);
  }
  torch::nn::Linear layer{8, 8};
  torch::Tensor in, out;
};
TORCH_MODULE(Shared);

/// Two gradients that autograd leaves in one memory: of `a` and of `b`.
struct OneMemoryImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    return x.flatten(1).mm(a.view({6, 4}) + b.view({6, 4}));
  }
  torch::Tensor a = register_parameter("a", torch::randn({24}));
  torch::Tensor b = register_parameter("b", torch::randn({2, 12}));
};
TORCH_MODULE(OneMemory);

/// Which layers are used depends on the call.
struct BranchImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x, bool use_left) {
    const auto h = x.flatten(1);
    return head(torch::tanh(use_left ? left(h) : right(h)));
  }
  torch::nn::Linear left = register_module("left", torch::nn::Linear(6, 8));
  torch::nn::Linear right = register_module("right", torch::nn::Linear(6, 8));
  torch::nn::Linear never = register_module("never", torch::nn::Linear(6, 8));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(8, 4));
};
TORCH_MODULE(Branch);

/// Batch normalisation as members and inside a Sequential.
struct NormImpl : torch::nn::Module {
  explicit NormImpl(std::optional<double> momentum = 0.1)
      : norm(torch::nn::BatchNorm2dOptions(5).momentum(momentum)) {
    register_module("conv", conv);
    register_module("norm", norm);
    rest = torch::nn::Sequential(
        torch::nn::Flatten(), torch::nn::Linear(30, 8),
        torch::nn::BatchNorm1d(8), torch::nn::Tanh(), torch::nn::Linear(8, 4));
    register_module("rest", rest);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return rest->forward(torch::relu(norm(conv(x.view({-1, 1, 2, 3})))));
  }
  torch::nn::Conv2d conv{torch::nn::Conv2dOptions(1, 5, 3).padding(1)};
  torch::nn::BatchNorm2d norm;
  torch::nn::Sequential rest{nullptr};
};
TORCH_MODULE(Norm);

}  // namespace echelon::nets
