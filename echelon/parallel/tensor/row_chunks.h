// Runs of rows of a matrix that several operations go over while they are in
// the cache. For the .cpp files of this folder.
#pragma once

#include <ATen/Parallel.h>
#include <torch/types.h>

#include <algorithm>
#include <cstdint>

#include "echelon/layers/computing_device.h"

namespace echelon::detail {

/// Calls work(begin, end) for runs of rows of a [rows, width] matrix that fit a
/// CPU core's or a GPU's L2 cache; the first of them where nothing is computed:
/// it has the temporaries of each.
template <class Work>
void for_row_chunks(const torch::Tensor& matrix, const Work& work) {
  constexpr int64_t kElements = 32 << 10;  // for each core
  constexpr int64_t kDeviceElements = 8 << 20;
  const int64_t rows = matrix.size(0);
  const int64_t width = std::max<int64_t>(1, matrix.size(1));
  const bool on_gpu = computing_device(matrix) == torch::kCUDA;
  const int64_t elements =
      on_gpu ? kDeviceElements : kElements * at::get_num_threads();
  const int64_t step = std::max<int64_t>(1, elements / width);
  for (int64_t begin = 0; begin < rows; begin += step) {
    work(begin, std::min(rows, begin + step));
    if (matrix.is_meta()) break;
  }
}

}  // namespace echelon::detail
