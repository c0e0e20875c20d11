// What differs between two checkpoints, tensor by tensor, whatever the layouts
// that wrote them. Free of LibTorch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "echelon/checkpoint/files/reader.h"

namespace echelon {

enum class Change {
  none,     // the same dtype, shape and bits
  values,   // another value somewhere
  dtype,    // as numbers (or not) compared all the same
  shape,    // not compared
  missing,  // A has it, B has not
  added,    // B has it, A has not
};
std::string to_string(Change change);

struct TensorDiff {
  std::string name;
  SavedKind kind = SavedKind::parameter;
  Change change = Change::none;
  std::string dtype_a, dtype_b;  // empty where it is not
  std::vector<int64_t> shape_a, shape_b;
  /// Elements, where they were compared, of which A and B have other bits, or,
  /// in another dtype, other numbers.
  int64_t differing = 0;
  /// Where both are floating-point numbers and of one shape: Euclidean norms of
  /// A's and of B - A, and the largest |b - a|. NaN where there is one; a NaN
  /// that both have in one place, with the same bits, is no difference.
  bool numbers = false;
  double norm = 0;
  double change_norm = 0;
  double largest = 0;

  /// change_norm / norm; infinite when A is zero and B is not.
  double relative() const;
};

/// Of all tensors, in A's order, then those that only B has. Tensors whose
/// dtype, shape and hash agree are the same and are not read. Throws
/// CheckpointError as the reader does.
///
///   wanted       false: such a tensor is not read, only dtype, shape and hash
///   say
///                whether it differs
///   progress     called now and then with the bytes of A that were compared
///   batch_bytes  of each checkpoint are in memory at a time
std::vector<TensorDiff> diff_checkpoints(
    CheckpointReader& a, CheckpointReader& b,
    const std::function<bool(const SavedTensor&)>& wanted = {},
    const std::function<void(int64_t)>& progress = {},
    size_t batch_bytes = size_t{64} << 20);

}  // namespace echelon
