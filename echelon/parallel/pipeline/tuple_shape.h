// Describes a tuple of tensors before it arrives: their number, dtypes and
// sizes, the order of their elements in memory, and which of them need a
// gradient.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/layers/layer_list.h"

namespace echelon::pipeline {

struct TensorShape {
  torch::Dtype dtype = torch::kFloat32;
  std::vector<int64_t> sizes;
  bool requires_grad = false;
  /// The tensor's strides if it is dense in memory, in any order of dimensions
  /// (such as channels last), else those of a contiguous tensor.
  std::vector<int64_t> strides;
  /// Ignores strides, which may change from call to call.
  bool operator==(const TensorShape& other) const {
    return dtype == other.dtype && sizes == other.sizes &&
           requires_grad == other.requires_grad;
  }
};

using TupleShape = std::vector<TensorShape>;

/// Limits of a header.
constexpr size_t kMaxTensors = 16;
constexpr size_t kMaxDims = 8;
constexpr int64_t kHeaderLength = 1 + kMaxTensors * (3 + 2 * kMaxDims);

/// Throws ConfigError, which begins with `giver`, for an undefined tensor and
/// for a tuple that does not fit into a header.
TupleShape shape_of(const Tensors& tensors, const std::string& giver);

/// The shape of the tuple of gradients: one for each entry that requires one.
TupleShape gradients_of(const TupleShape& shape);

/// A header, int64 [kHeaderLength] on the CPU, and back.
torch::Tensor encode(const TupleShape& shape);
TupleShape decode(const torch::Tensor& header);

/// Uninitialised tensors of this shape, with its strides.
Tensors empty_like(const TupleShape& shape, torch::Device device);

/// A contiguous tensor with the elements of `tensor` in the memory order of
/// these strides (of a TensorShape), for messages. It shares the tensor's
/// memory if the tensor has these strides, else it is a copy.
torch::Tensor in_order(const torch::Tensor& tensor, at::IntArrayRef strides);

/// "float32 [8, 16] and int64 [8]".
std::string to_text(const TupleShape& shape);

/// A 64-bit hash of shapes, schedules and settings.
class Fingerprint {
 public:
  void add(int64_t value);
  void add(const TupleShape& shape);
  int64_t value() const { return static_cast<int64_t>(hash_); }

 private:
  uint64_t hash_ = 0xcbf29ce484222325u;
};

}  // namespace echelon::pipeline
