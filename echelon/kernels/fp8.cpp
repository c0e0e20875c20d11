#include "echelon/kernels/fp8.h"

#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string>
#include <tuple>

#include "echelon/comm/nccl/accelerator.h"
#include "echelon/kernels/dispatcher.h"
#include "echelon/kernels/kernel_source.h"
#include "echelon/kernels/numbers.h"

namespace echelon::kernels {
namespace {

using torch::Tensor;

constexpr int kLargestThreads = 256;  // as in fp8.cu
constexpr int kRoundingThreads = 256;
constexpr int64_t kTile = 64;

void launch_fp8(
    const std::string& name, const Tensor& on, int64_t blocks, int threads,
    void** arguments) {
  if (blocks == 0) return;
  const c10::DeviceGuard guard(on.device());
  launch_kernel(fp8_source().text, name, blocks, threads, arguments);
}

// The bits of the largest magnitude.
Tensor largest_magnitude_on_gpu(const Tensor& x) {
  // Enough blocks to keep a GPU busy, each with several accesses a thread.
  constexpr int64_t kMostBlocks = 2048, kAccesses = 8;
  auto largest = torch::zeros({}, x.options().dtype(torch::kInt32));
  const void* from = x.const_data_ptr();
  void* to = largest.mutable_data_ptr();
  int64_t n = x.numel();
  const int64_t in_a_block = packet_of(x) * kAccesses * kLargestThreads;
  int64_t blocks = std::min(kMostBlocks, (n + in_a_block - 1) / in_a_block);
  std::array<void*, 4> arguments = {&from, &to, &n, &blocks};
  launch_fp8(
      "largest_magnitude" + number_suffix(x.scalar_type()), x, blocks,
      kLargestThreads, arguments.data());
  return largest;
}

using Rounded = std::tuple<Tensor, Tensor, Tensor>;

// Those that are not wanted are empty.
Rounded rounded_like(const Tensor& x, bool gradient, bool rows, bool columns) {
  const auto options =
      x.options().dtype(gradient ? torch::kFloat8_e5m2 : torch::kFloat8_e4m3fn);
  return {
      torch::empty(rows ? x.sizes().vec() : std::vector<int64_t>{0}, options),
      torch::empty(
          columns ? std::vector<int64_t>{x.size(1), x.size(0)}
                  : std::vector<int64_t>{0},
          options),
      torch::empty({}, x.options().dtype(torch::kFloat32))};
}

Rounded to_fp8_on_gpu(
    const Tensor& x, const Tensor& largest, bool gradient, bool rows,
    bool columns) {
  auto result = rounded_like(x, gradient, rows, columns);
  auto& [row_major, transposed, scale] = result;
  const void* from = x.const_data_ptr();
  const void* bits = largest.const_data_ptr();
  void* to_rows = rows ? row_major.mutable_data_ptr() : nullptr;
  void* to_columns = columns ? transposed.mutable_data_ptr() : nullptr;
  void* unit = scale.mutable_data_ptr();
  int64_t height = x.size(0), width = x.size(1);
  auto across = static_cast<uint32_t>((width + kTile - 1) / kTile);
  std::array<void*, 8> arguments = {&from, &bits,   &to_rows, &to_columns,
                                    &unit, &height, &width,   &across};
  launch_fp8(
      (gradient ? "to_e5m2" : "to_e4m3") + number_suffix(x.scalar_type()), x,
      (height + kTile - 1) / kTile * across, kRoundingThreads,
      arguments.data());
  return result;
}

Tensor& multiply_on_gpu(
    Tensor& y, const Tensor& left, const Tensor& right,
    const Tensor& left_scale, const Tensor& right_scale) {
  // Sums of forward may keep fewer bits, as other frameworks have it. Those of
  // gradients keep all.
  const bool fast = left.scalar_type() == torch::kFloat8_e4m3fn &&
                    right.scalar_type() == torch::kFloat8_e4m3fn;
  at::_scaled_mm_out(
      y, left, right.t(), left_scale, right_scale, /*bias=*/std::nullopt,
      /*scale_result=*/std::nullopt, y.scalar_type(), fast);
  return y;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(echelon, library) {
  library.def("largest_magnitude(Tensor x) -> Tensor");
  library.def(
      "to_fp8(Tensor x, Tensor largest, bool gradient, bool rows, bool "
      "columns) -> (Tensor, Tensor, Tensor)");
  library.def(
      "fp8_mm_(Tensor(a!) y, Tensor left, Tensor right, Tensor left_scale, "
      "Tensor right_scale) -> Tensor(a!)");
}
TORCH_LIBRARY_IMPL(echelon, CUDA, library) {
  library.impl("largest_magnitude", largest_magnitude_on_gpu);
  library.impl("to_fp8", to_fp8_on_gpu);
  library.impl("fp8_mm_", multiply_on_gpu);
}
TORCH_LIBRARY_IMPL(echelon, Meta, library) {
  library.impl("largest_magnitude", [](const Tensor& x) {
    return torch::empty({}, x.options().dtype(torch::kInt32));
  });
  library.impl(
      "to_fp8",
      [](const Tensor& x, const Tensor&, bool gradient, bool rows,
         bool columns) { return rounded_like(x, gradient, rows, columns); });
  library.impl(
      "fp8_mm_",
      [](Tensor& y, const Tensor&, const Tensor&, const Tensor&,
         const Tensor&) -> Tensor& { return y; });
}

bool takes_fp8(const Tensor& matrix) {
  return matrix.dim() == 2 && matrix.is_contiguous() &&
         is_kernel_number(matrix.scalar_type()) && matrix.size(1) % 16 == 0 &&
         (matrix.is_meta() || begins_a_packet(matrix)) &&
         uses_kernels(fp8_source(), matrix);
}

Fp8Values
round_to_fp8(const Tensor& matrix, bool gradient, bool rows, bool columns) {
  static const auto largest_of =
      operator_named<Tensor(const Tensor&)>("echelon::largest_magnitude");
  static const auto rounded =
      operator_named<Rounded(const Tensor&, const Tensor&, bool, bool, bool)>(
          "echelon::to_fp8");
  auto [row_major, transposed, scale] =
      rounded.call(matrix, largest_of.call(matrix), gradient, rows, columns);
  return {rows ? row_major : Tensor(), columns ? transposed : Tensor(), scale};
}

void multiply_fp8(
    Tensor y, const Tensor& left, const Tensor& right, const Tensor& left_scale,
    const Tensor& right_scale) {
  static const auto multiply = operator_named<Tensor&(
      Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&)>(
      "echelon::fp8_mm_");
  multiply.call(y, left, right, left_scale, right_scale);
}

}  // namespace echelon::kernels
