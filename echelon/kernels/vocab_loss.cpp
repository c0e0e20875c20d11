#include "echelon/kernels/vocab_loss.h"

#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string>

#include "echelon/comm/nccl/accelerator.h"
#include "echelon/kernels/dispatcher.h"
#include "echelon/kernels/kernel_source.h"
#include "echelon/kernels/numbers.h"

namespace echelon::kernels {

namespace {

using torch::Tensor;

template <size_t N>
void launch_rows(
    const char* kernel, const Tensor& rows, std::array<void*, N> arguments) {
  if (rows.numel() == 0) return;
  const c10::DeviceGuard guard(rows.device());
  launch_kernel(
      vocab_loss_source().text, kernel + number_suffix(rows.scalar_type()),
      rows.size(0), kVocabLossThreads, arguments.data());
}

Tensor sums_like(const Tensor& rows) {
  return torch::empty({3, rows.size(0)}, rows.options().dtype(torch::kFloat32));
}

// With as much room behind each row.
Tensor gradient_like(const Tensor& rows) {
  const int64_t n = rows.size(0), width = rows.size(1);
  const int64_t stride = n > 1 ? std::max(width, rows.stride(0)) : width;
  return torch::empty({n, stride}, rows.options()).narrow(1, 0, width);
}

Tensor sums_on_gpu(const Tensor& rows, const Tensor& ids) {
  auto sums = sums_like(rows);
  const void* from = rows.const_data_ptr();
  const void* targets = ids.const_data_ptr();
  void* to = sums.mutable_data_ptr();
  int64_t n = rows.size(0), width = rows.size(1), stride = rows.stride(0);
  launch_rows(
      "vocab_sums", rows,
      std::array<void*, 6>{&from, &targets, &to, &n, &width, &stride});
  return sums;
}

Tensor gradient_on_gpu(
    const Tensor& rows, const Tensor& ids, const Tensor& total,
    const Tensor& scale) {
  auto gradient = gradient_like(rows);
  const void* from = rows.const_data_ptr();
  const void* targets = ids.const_data_ptr();
  const void* totals = total.const_data_ptr();
  const void* scales = scale.const_data_ptr();
  void* to = gradient.mutable_data_ptr();
  int64_t width = rows.size(1), stride = rows.stride(0);
  int64_t out_stride = gradient.stride(0);
  launch_rows(
      "vocab_gradient", rows,
      std::array<void*, 8>{
          &from, &targets, &totals, &scales, &to, &width, &stride,
          &out_stride});
  return gradient;
}

Tensor sums_of_shapes(const Tensor& rows, const Tensor&) {
  return sums_like(rows);
}

Tensor gradient_of_shapes(
    const Tensor& rows, const Tensor&, const Tensor&, const Tensor&) {
  return gradient_like(rows);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(echelon, library) {
  library.def("vocab_sums(Tensor rows, Tensor ids) -> Tensor");
  library.def(
      "vocab_gradient(Tensor rows, Tensor ids, Tensor total, Tensor scale) -> "
      "Tensor");
}
TORCH_LIBRARY_IMPL(echelon, CUDA, library) {
  library.impl("vocab_sums", sums_on_gpu);
  library.impl("vocab_gradient", gradient_on_gpu);
}
TORCH_LIBRARY_IMPL(echelon, Meta, library) {
  library.impl("vocab_sums", sums_of_shapes);
  library.impl("vocab_gradient", gradient_of_shapes);
}

bool takes(const Tensor& rows) {
  return rows.dim() == 2 && (rows.stride(1) == 1 || rows.size(1) <= 1) &&
         is_kernel_number(rows.scalar_type()) &&
         uses_kernels(vocab_loss_source(), rows);
}

Tensor vocab_sums(const Tensor& rows, const Tensor& ids) {
  static const auto op = operator_named<Tensor(const Tensor&, const Tensor&)>(
      "echelon::vocab_sums");
  return op.call(rows, ids.contiguous());
}

Tensor vocab_gradient(
    const Tensor& rows, const Tensor& ids, const Tensor& total,
    const Tensor& scale) {
  static const auto op = operator_named<Tensor(
      const Tensor&, const Tensor&, const Tensor&, const Tensor&)>(
      "echelon::vocab_gradient");
  return op.call(
      rows, ids.contiguous(), total.contiguous(), scale.contiguous());
}

}  // namespace echelon::kernels
