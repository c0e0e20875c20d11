// Differences between two checkpoints of any layouts, tensor by tensor. Free of
// LibTorch.
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
  dtype,    // compared as numbers where both are floating-point
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
  /// Compared elements with different bits in A and B or, where the dtypes
  /// differ, different numbers.
  int64_t differing = 0;
  /// Where both are floating-point and of one shape: the Euclidean norms of A
  /// and of B - A, and the largest |b - a|. NaN where either has one, unless
  /// both have it in the same place with the same bits.
  bool numbers = false;
  double norm = 0;
  double change_norm = 0;
  double largest = 0;

  /// change_norm / norm; infinite when A is zero and B is not.
  double relative() const;
};

/// The differences of all tensors in A's order, then of those that only B has.
/// Tensors whose dtype, shape and hash agree are equal and are not read. Throws
/// CheckpointError as the reader does.
///
///   wanted       returns false for tensors that are not to be read: only
///   dtype,
///                shape and hash say whether they differ
///   progress     called now and then with the bytes of A that were compared
///   batch_bytes  of each checkpoint that are in memory at a time
std::vector<TensorDiff> diff_checkpoints(
    CheckpointReader& a, CheckpointReader& b,
    const std::function<bool(const SavedTensor&)>& wanted = {},
    const std::function<void(int64_t)>& progress = {},
    size_t batch_bytes = size_t{64} << 20);

}  // namespace echelon
