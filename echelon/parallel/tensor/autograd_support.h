// Helpers of this folder's autograd functions, for its .cpp files.
#pragma once

#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/types.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "echelon/error.h"
#include "echelon/layers/computing_device.h"

namespace echelon::detail {

/// Throws Error in a backward that is itself recorded (create_graph): the
/// results of these functions would look like constants in it.
inline void refuse_second_derivative(const std::string& function) {
  if (!torch::GradMode::is_enabled()) return;
  throw Error(
      "[tensor parallel] the backward of " + function +
      " cannot be differentiated again; call backward without create_graph");
}

/// Calls work(begin, end) for chunks of rows of a [rows, width] matrix that fit
/// into a CPU core's or a GPU's L2 cache, so that several operators find them
/// there. For a meta tensor calls only the first, whose temporaries are those
/// of each.
template <class Work>
void for_row_chunks(const torch::Tensor& matrix, const Work& work) {
  constexpr int64_t kElements = 32 << 10;  // for each core
  constexpr int64_t kDeviceElements = 8 << 20;
  const int64_t rows = matrix.size(0);
  const int64_t width = std::max<int64_t>(1, matrix.size(1));
  const int64_t elements =
      at::accelerator::isAccelerator(computing_device(matrix))
          ? kDeviceElements
          : kElements * at::get_num_threads();
  const int64_t step = std::max<int64_t>(1, elements / width);
  for (int64_t begin = 0; begin < rows; begin += step) {
    work(begin, std::min(rows, begin + step));
    if (matrix.is_meta()) break;
  }
}

/// The tensor in which `parts` lie side by side along `dim`, a view of their
/// memory without history; undefined where they do not.
inline torch::Tensor side_by_side(at::TensorList parts, int64_t dim) {
  const auto& first = parts[0];
  if (!first.defined() || first.dim() == 0) return {};
  dim = at::maybe_wrap_dim(dim, first.dim());
  auto sizes = first.sizes().vec();
  int64_t end = first.storage_offset();
  sizes[dim] = 0;
  for (const auto& part : parts) {
    if (!part.defined() || part.dim() != first.dim()) return {};
    const bool follows = part.storage_offset() == end &&
                         part.is_alias_of(first) &&
                         part.scalar_type() == first.scalar_type() &&
                         part.strides() == first.strides();
    if (!follows) return {};
    for (int64_t d = 0; d < first.dim(); ++d) {
      if (d != dim && part.size(d) != first.size(d)) return {};
    }
    end += part.size(dim) * part.stride(dim);
    sizes[dim] += part.size(dim);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return first.as_strided(sizes, first.strides(), first.storage_offset());
}

/// The parts of `whole` along `dim`, views without history.
inline std::vector<torch::Tensor>
parts_of(const torch::Tensor& whole, at::IntArrayRef sizes, int64_t dim) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return whole.split_with_sizes(sizes, dim);
}

}  // namespace echelon::detail
