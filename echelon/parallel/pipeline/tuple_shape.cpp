#include "echelon/parallel/pipeline/tuple_shape.h"

#include <torch/types.h>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::pipeline {
namespace {

std::vector<int64_t> strides_of(const torch::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) return tensor.strides().vec();
  const auto strides = c10::contiguous_strides(tensor.sizes());
  return {strides.begin(), strides.end()};
}

// A dimension of one element may have any stride.
bool has_strides(const torch::Tensor& tensor, at::IntArrayRef strides) {
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    const auto at = static_cast<size_t>(d);
    if (tensor.size(d) != 1 && tensor.stride(d) != strides[at]) return false;
  }
  return true;
}

}  // namespace

TupleShape shape_of(const Tensors& tensors, const std::string& giver) {
  if (tensors.size() > kMaxTensors) {
    throw ConfigError(format(
        "{} gives {} tensors; at most {} pass from a stage to the next: stack "
        "some, or partition elsewhere",
        giver, tensors.size(), kMaxTensors));
  }
  TupleShape shape;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& tensor = tensors[i];
    if (!tensor.defined()) {
      throw ConfigError(format(
          "{}: tensor {} of {} is undefined; give an empty tensor, or a "
          "shorter tuple",
          giver, i, tensors.size()));
    }
    if (tensor.dim() > static_cast<int64_t>(kMaxDims)) {
      throw ConfigError(format(
          "{}: tensor {} has {} dimensions; at most {} pass from a stage to "
          "the next",
          giver, i, tensor.dim(), kMaxDims));
    }
    shape.push_back(
        {.dtype = tensor.scalar_type(),
         .sizes = tensor.sizes().vec(),
         .requires_grad = tensor.requires_grad(),
         .strides = strides_of(tensor)});
  }
  return shape;
}

TupleShape gradients_of(const TupleShape& shape) {
  TupleShape gradients;
  for (const auto& tensor : shape) {
    if (!tensor.requires_grad) continue;
    gradients.push_back(tensor);
    gradients.back().requires_grad = false;
  }
  return gradients;
}

torch::Tensor encode(const TupleShape& shape) {
  torch::Tensor header = torch::zeros({kHeaderLength}, torch::kInt64);
  int64_t* at = header.data_ptr<int64_t>();
  *at++ = static_cast<int64_t>(shape.size());
  for (const auto& tensor : shape) {
    at[0] = static_cast<int64_t>(tensor.dtype);
    at[1] = tensor.requires_grad ? 1 : 0;
    at[2] = static_cast<int64_t>(tensor.sizes.size());
    std::copy(tensor.sizes.begin(), tensor.sizes.end(), at + 3);
    std::copy(tensor.strides.begin(), tensor.strides.end(), at + 3 + kMaxDims);
    at += 3 + 2 * kMaxDims;
  }
  return header;
}

TupleShape decode(const torch::Tensor& header) {
  const torch::Tensor host = header.cpu();
  const int64_t* at = host.data_ptr<int64_t>();
  TupleShape shape(static_cast<size_t>(*at++));
  for (auto& tensor : shape) {
    tensor.dtype = static_cast<torch::Dtype>(at[0]);
    tensor.requires_grad = at[1] != 0;
    tensor.sizes.assign(at + 3, at + 3 + at[2]);
    tensor.strides.assign(at + 3 + kMaxDims, at + 3 + kMaxDims + at[2]);
    at += 3 + 2 * kMaxDims;
  }
  return shape;
}

Tensors empty_like(const TupleShape& shape, torch::Device device) {
  Tensors tensors;
  for (const auto& tensor : shape) {
    tensors.push_back(torch::empty_strided(
        tensor.sizes, tensor.strides,
        torch::TensorOptions().dtype(tensor.dtype).device(device)));
  }
  return tensors;
}

torch::Tensor in_order(const torch::Tensor& tensor, at::IntArrayRef strides) {
  const torch::Tensor values = tensor.detach().resolve_conj().resolve_neg();
  torch::Tensor dense = values;
  if (!has_strides(dense, strides)) {
    dense = torch::empty_strided(dense.sizes(), strides, dense.options());
    dense.copy_(values);
  }
  return dense.is_contiguous() ? dense : dense.as_strided({dense.numel()}, {1});
}

std::string to_text(const TupleShape& shape) {
  return describe(empty_like(shape, torch::kMeta));
}

void Fingerprint::add(int64_t value) {
  for (int i = 0; i < 8; ++i) {
    hash_ ^= static_cast<uint64_t>(value) >> (8 * i) & 0xff;
    hash_ *= 0x100000001b3u;
  }
}

void Fingerprint::add(const TupleShape& shape) {
  add(static_cast<int64_t>(shape.size()));
  for (const auto& tensor : shape) {
    add(static_cast<int64_t>(tensor.dtype));
    add(tensor.requires_grad ? 1 : 0);
    add(static_cast<int64_t>(tensor.sizes.size()));
    for (int64_t size : tensor.sizes) add(size);
  }
}

}  // namespace echelon::pipeline
