// What the memory that parameters are views of offers to the layers that
// compute with them: sharded data parallelism keeps the parameters of a layer
// in one buffer, and their gradients in another one.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>

namespace echelon {

/// What with_zero_rows() pads to a multiple of, in rows: matmuls are fast on
/// matrices whose sizes are multiples of it.
inline constexpr int64_t kPaddedRows = 128;

/// The owner of such memory. Layers find it by parameter_owner_of(). Calls may
/// come from any thread.
class ParameterOwner {
 public:
  virtual ~ParameterOwner() = default;

  /// Memory for the gradient of `weight`, which is a parameter or several that
  /// lie one after the other. It has the shape of `weight`, is contiguous, and
  /// its values are undefined. Undefined where the gradient needs memory of its
  /// own: one is there already, to be added to, or has another dtype.
  ///
  /// Only a backward that writes the gradient there as a whole, and then
  /// returns it, may call this. The owner takes another gradient as well: it is
  /// copied.
  virtual torch::Tensor gradient_of(const torch::Tensor& weight) = 0;

  /// `matrix`, a parameter [rows, columns], with rows of zeros behind it up to
  /// a multiple of kPaddedRows: a view without history. Undefined where the
  /// memory has none.
  virtual torch::Tensor with_zero_rows(const torch::Tensor& matrix) = 0;
};

/// The owner of the memory of `tensor`, until it is destroyed; null for other
/// tensors.
std::shared_ptr<ParameterOwner> parameter_owner_of(const torch::Tensor& tensor);

/// Names the owner of a storage. A storage belongs to one owner, and is freed
/// after it.
void set_parameter_owner(
    const c10::StorageImpl* storage, std::weak_ptr<ParameterOwner> owner);
/// Call before the storage is freed.
void remove_parameter_owner(const c10::StorageImpl* storage);

}  // namespace echelon
