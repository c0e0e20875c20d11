// What is known of a tuple of tensors before it arrives: how many there are,
// their dtypes and sizes, the order of their elements in memory, and which of
// them want a gradient back.
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
  /// Of a tensor whose elements lie together in memory, in any order (images
  /// with channels last, say); for any other those of the contiguous one.
  std::vector<int64_t> strides;
  /// Apart from strides: in which order elements lie may change from call to
  /// call.
  bool operator==(const TensorShape& other) const {
    return dtype == other.dtype && sizes == other.sizes &&
           requires_grad == other.requires_grad;
  }
};

using TupleShape = std::vector<TensorShape>;

/// What fits into a header.
constexpr size_t kMaxTensors = 16;
constexpr size_t kMaxDims = 8;
constexpr int64_t kHeaderLength = 1 + kMaxTensors * (3 + 2 * kMaxDims);

/// Throws ConfigError, beginning with `giver`, for an undefined tensor and for
/// a tuple that no header holds.
TupleShape shape_of(const Tensors& tensors, const std::string& giver);

/// The entries that want a gradient: the shape of the tuple of gradients.
TupleShape gradients_of(const TupleShape& shape);

/// int64 [kHeaderLength] on the CPU, and back.
torch::Tensor encode(const TupleShape& shape);
TupleShape decode(const torch::Tensor& header);

/// Uninitialised tensors of that shape, with its strides.
Tensors empty_like(const TupleShape& shape, torch::Device device);

/// The elements of `tensor` as they lie in memory with these strides (a
/// TensorShape's), for messages: contiguous, and the tensor's own memory where
/// it has these strides, else a copy.
torch::Tensor in_order(const torch::Tensor& tensor, at::IntArrayRef strides);

/// "float32 [8, 16] and int64 [8]".
std::string to_text(const TupleShape& shape);

/// 64 bits that tell shapes, schedules and settings apart.
class Fingerprint {
 public:
  void add(int64_t value);
  void add(const TupleShape& shape);
  int64_t value() const { return static_cast<int64_t>(hash_); }

 private:
  uint64_t hash_ = 0xcbf29ce484222325u;
};

}  // namespace echelon::pipeline
