// Models as lists of layers, each with something that a stage boundary must not
// break.
#pragma once

#include <torch/torch.h>

#include <memory>
#include <string>
#include <tuple>

#include "echelon/layers/layer_list.h"
#include "tests/support/parity.h"

namespace echelon::nets {

using torch::Tensor;

// The layers of these lists have values that depend on their name alone, in
// float64.
inline uint64_t seed_of(const std::string& name) {
  uint64_t seed = 7;
  for (char c : name) seed = seed * 31 + static_cast<unsigned char>(c);
  return seed % 1000003;
}

template <class Holder>
Holder with_values(const std::string& name, Holder holder) {
  parity::give_values(*holder, seed_of(name));
  return holder;
}

inline void add_linear(
    LayerList& list, const std::string& name, int in, int out,
    bool bias = true) {
  list.add(name, [=] {
    return with_values(
        name, torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(bias)));
  });
}

/// 8 layers; one changes its input in place.
inline LayerList mlp() {
  LayerList list;
  add_linear(list, "fc1", 6, 10);
  list.add_function("act1", [](const Tensor& x) { return torch::tanh(x); });
  add_linear(list, "fc2", 10, 12);
  list.add_function("act2", [](const Tensor& x) {
    Tensor y = x;
    return torch::relu_(y);
  });
  add_linear(list, "fc3", 12, 9);
  list.add("norm", [] {
    return with_values(
        "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({9})));
  });
  add_linear(list, "fc4", 9, 7);
  add_linear(list, "fc5", 7, 4);
  return list;
}

/// 8 layers, images [N, 2, 6, 3] flattened to [N, 36] outside.
inline LayerList conv() {
  LayerList list;
  list.add_function("image", [](const Tensor& x) {
    return x.view({-1, 1, 2, 3});
  });
  const auto convolution = [&](const std::string& name, int in, int out) {
    list.add(name, [=] {
      return with_values(
          name,
          torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).padding(1)));
    });
  };
  const auto norm = [&](const std::string& name, int channels) {
    list.add(name, [=] {
      return with_values(
          name, torch::nn::GroupNorm(torch::nn::GroupNormOptions(2, channels)));
    });
  };
  convolution("conv1", 1, 4);
  norm("norm1", 4);
  convolution("conv2", 4, 6);
  norm("norm2", 6);
  list.add_function("act", [](const Tensor& x) { return torch::gelu(x); });
  list.add_function("flat", [](const Tensor& x) { return x.flatten(1); });
  add_linear(list, "head", 36, 4);
  return list;
}

struct SkipBlockImpl : torch::nn::Module {
  explicit SkipBlockImpl(int n)
      : fc(register_module("fc", torch::nn::Linear(n, n))) {}
  std::tuple<Tensor, Tensor> forward(const Tensor& x, const Tensor& skip) {
    return {torch::tanh(fc(x)), skip};
  }
  torch::nn::Linear fc;
};
TORCH_MODULE(SkipBlock);

/// 8 layers; what "fork" makes is added by "join", five layers later, and one
/// of the tensors that pass is used by nobody.
inline LayerList skip() {
  LayerList list;
  add_linear(list, "fc1", 6, 8);
  list.add_function("fork", [](const Tensor& x) {
    return std::make_tuple(torch::tanh(x), x);
  });
  for (const char* name : {"block1", "block2", "block3"}) {
    list.add(name, [=] { return with_values(name, SkipBlock(8)); });
  }
  list.add_function("side", [](const Tensor& x, const Tensor& skip) {
    return std::make_tuple(x, skip, x * 2);
  });
  list.add_function(
      "join", [](const Tensor& x, const Tensor& skip, const Tensor&) {
        return x + skip;
      });
  add_linear(list, "head", 8, 4);
  return list;
}

/// 8 layers; the first and the last but one share their weight, and so does one
/// between.
inline LayerList tied() {
  LayerList list;
  add_linear(list, "in", 6, 6, false);
  list.add_function("act1", [](const Tensor& x) { return torch::tanh(x); });
  add_linear(list, "fc1", 6, 6);
  add_linear(list, "middle", 6, 6, false);
  list.add_function("act2", [](const Tensor& x) { return torch::tanh(x); });
  add_linear(list, "fc2", 6, 6);
  add_linear(list, "out", 6, 6, false);
  add_linear(list, "head", 6, 4);
  list.tie("in.weight", "out.weight");
  list.tie("in.weight", "middle.weight");
  return list;
}

/// 8 layers; a mask of bool and a tensor of whole numbers travel along.
inline LayerList masked() {
  LayerList list;
  add_linear(list, "fc1", 6, 8);
  list.add_function("mask", [](const Tensor& x) {
    const Tensor rows = torch::arange(x.size(0));
    return std::make_tuple(x, (rows % 3 != 1).unsqueeze(1), rows);
  });
  const auto act = [](const Tensor& x, const Tensor& mask, const Tensor& rows) {
    return std::make_tuple(
        torch::where(mask, torch::tanh(x), x * 0.5), mask, rows + 1);
  };
  struct Impl : torch::nn::Module {
    std::tuple<Tensor, Tensor, Tensor>
    forward(const Tensor& x, const Tensor& mask, const Tensor& rows) {
      return {fc(x) * mask, mask, rows};
    }
    torch::nn::Linear fc = register_module("fc", torch::nn::Linear(8, 8));
  };
  for (const char* name : {"fc2", "fc3"}) {
    list.add_function(std::string(name) + "_act", act);
    list.add(name, [=] {
      auto module = std::make_shared<Impl>();
      parity::give_values(*module, seed_of(name));
      return module;
    });
  }
  list.add_function(
      "scale", [](const Tensor& x, const Tensor& mask, const Tensor& rows) {
        return x * mask + 0.01 * rows.unsqueeze(1).to(x.dtype());
      });
  add_linear(list, "head", 8, 4);
  return list;
}

inline LayerList named(const std::string& name) {
  if (name == "mlp") return mlp();
  if (name == "conv") return conv();
  if (name == "skip") return skip();
  if (name == "tied") return tied();
  return masked();
}

}  // namespace echelon::nets
