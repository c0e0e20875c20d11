// The layers that our models are made of. Unlike torch::nn's they leave their
// parameters uninitialised: initialize() writes them, once.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <memory>

namespace echelon::models {

/// weight [out, in], bias [out]; x [batch, in] -> [batch, out].
class Linear : public torch::nn::Module {
 public:
  Linear(int64_t in, int64_t out);
  torch::Tensor forward(const torch::Tensor& x) const;

  torch::Tensor weight;
  torch::Tensor bias;

 private:
  void pretty_print(std::ostream& stream) const override;
};

struct ConvShape {
  int64_t in = 1;
  int64_t out = 1;
  int64_t kernel = 3;
  int64_t stride = 1;
  bool bias = true;
};

/// weight [out, in, kernel, kernel], bias [out] or undefined, padding
/// kernel / 2; x [batch, in, h, w] -> [batch, out, ceil(h / stride), …].
class Conv2d : public torch::nn::Module {
 public:
  explicit Conv2d(const ConvShape& shape);
  torch::Tensor forward(const torch::Tensor& x) const;

  torch::Tensor weight;
  torch::Tensor bias;

 private:
  void pretty_print(std::ostream& stream) const override;

  ConvShape shape_;
};

}  // namespace echelon::models
