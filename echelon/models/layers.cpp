#include "echelon/models/layers.h"

#include <ostream>

namespace echelon::models {

Linear::Linear(int64_t in, int64_t out)
    : weight(register_parameter("weight", torch::empty({out, in}))),
      bias(register_parameter("bias", torch::empty({out}))) {}

torch::Tensor Linear::forward(const torch::Tensor& x) const {
  return at::linear(x, weight, bias);
}

void Linear::pretty_print(std::ostream& stream) const {
  stream << "Linear(" << weight.size(1) << ", " << weight.size(0) << ")";
}

Conv2d::Conv2d(const ConvShape& shape)
    : weight(register_parameter(
          "weight",
          torch::empty({shape.out, shape.in, shape.kernel, shape.kernel}))),
      shape_(shape) {
  if (shape.bias) {
    bias = register_parameter("bias", torch::empty({shape.out}));
  }
}

torch::Tensor Conv2d::forward(const torch::Tensor& x) const {
  return at::conv2d(x, weight, bias, shape_.stride, shape_.kernel / 2);
}

void Conv2d::pretty_print(std::ostream& stream) const {
  stream << "Conv2d(" << shape_.in << ", " << shape_.out << ", "
         << shape_.kernel << "x" << shape_.kernel << ", stride "
         << shape_.stride << ")";
}

}  // namespace echelon::models
