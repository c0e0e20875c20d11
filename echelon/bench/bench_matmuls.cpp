#include "echelon/bench/bench_matmuls.h"

#include <torch/types.h>

#include <algorithm>
#include <array>
#include <functional>
#include <tuple>
#include <utility>

#include "echelon/bench/bench_operators.h"

namespace echelon {
namespace {

using torch::Tensor;

// Sides are a factor of 4 to 8 apart; the simulator interpolates.
const std::vector<int64_t> kProcessorRows = {16, 128, 1024, 8192};
const std::vector<int64_t> kProcessorSides = {16, 64, 256, 1024};
const std::vector<int64_t> kLowProcessorRows = {128, 1024};
const std::vector<int64_t> kLowProcessorSides = {64, 256};
const std::vector<int64_t> kGpuRows = {128, 512, 2048, 8192};
const std::vector<int64_t> kGpuSides = {128, 512, 2048, 8192};
constexpr int64_t kLargestOfProcessor = 8192 * 1024;  // elements of a matrix
constexpr int64_t kLargestOfGpu = 8192 * 8192;

class Matmuls {
 public:
  explicit Matmuls(BenchMeter& meter) : meter_(meter) {}

  // Measures all calls.
  std::vector<MatrixRate> rates() {
    calls_.push_back(smallest_call(meter_.device()));
    const auto seconds = meter_.seconds_of(calls_);
    // A GPU computes while the host launches the next operator.
    const double start = meter_.on_gpu() ? 0 : seconds.back();
    for (size_t i = 0; i < rates_.size(); ++i) {
      // So far this has the FLOPs of the call.
      rates_[i].flops_per_second /=
          std::max(seconds[i] - start, seconds[i] / 4);
    }
    return std::move(rates_);
  }

  void matmuls(
      Precision precision, torch::Dtype dtype, const std::vector<int64_t>& rows,
      const std::vector<int64_t>& sides) {
    const auto options = torch::dtype(dtype).device(meter_.device());
    for (int64_t m : rows) {
      for (int64_t n : sides) {
        for (int64_t k : sides) {
          const Tensor a = buffer(0, {m, k}, options);
          const Tensor b = buffer(1, {n, k}, options).t();
          const Tensor c = buffer(2, {m, n}, options);
          add({precision, m, n, k}, 1, [a, b, c] {
            Tensor out = c;
            torch::mm_out(out, a, b);
          });
        }
      }
    }
  }

  // 3x3, on images of side x side pixels. Few channels are channels last, as in
  // the networks of models/.
  void convolution(int64_t images, int64_t in, int64_t out, int64_t side) {
    const auto order = in < 64 ? torch::MemoryFormat::ChannelsLast
                               : torch::MemoryFormat::Contiguous;
    const Tensor x = torch::full({images, in, side, side}, 0.5, meter_.device())
                         .contiguous(order);
    const Tensor weight = torch::full({out, in, 3, 3}, 0.5, meter_.device());
    // In the memory format that the kernel chooses.
    const Tensor y = torch::conv2d(x, weight, {}, 1, 1);
    const MatrixRate shape{Precision::fp32, images * side * side, out, in * 9};
    add(
        shape, 1, [=] { torch::conv2d(x, weight, {}, 1, 1); },
        ProductKind::convolution);
    for (const bool inputs : {true, false}) {
      const auto gradients = [=] {
        torch::convolution_backward(
            y, x, weight, std::nullopt, {1, 1}, {1, 1}, {1, 1}, false, {0, 0},
            1, {inputs, !inputs, false});
      };
      add(shape, 1, gradients,
          inputs ? ProductKind::convolution_inputs
                 : ProductKind::convolution_weights);
    }
  }

  // Causal, with `heads` heads over all samples.
  void attention(int64_t heads, int64_t length, int64_t size) {
    const Tensor x =
        torch::full({1, heads, length, size}, 0.5, meter_.device());
    const MatrixRate shape{Precision::fp32, length, length, size};
    const auto [y, sums] =
        at::_scaled_dot_product_flash_attention_for_cpu(x, x, x, 0.0, true);
    add(
        shape, heads,
        [=] {
          at::_scaled_dot_product_flash_attention_for_cpu(x, x, x, 0.0, true);
        },
        ProductKind::attention);
    add(
        shape, heads,
        [x, y = y, sums = sums] {
          at::_scaled_dot_product_flash_attention_for_cpu_backward(
              x, x, x, x, y, sums, 0.0, true);
        },
        ProductKind::attention_gradients);
  }

 private:
  void
  add(MatrixRate rate, int64_t count, std::function<void()> call,
      ProductKind kind = ProductKind::product) {
    rate.kind = kind;
    rate.flops_per_second =
        static_cast<double>(count) * product_flops(
                                         kind, static_cast<double>(rate.m),
                                         static_cast<double>(rate.n),
                                         static_cast<double>(rate.k));
    rates_.push_back(rate);
    calls_.push_back(std::move(call));
  }

  // All matmuls use the same memory, one after the other.
  Tensor buffer(
      size_t which, at::IntArrayRef sizes,
      const torch::TensorOptions& options) {
    Tensor& all = buffers_[which][options.dtype() == torch::kFloat32 ? 0 : 1];
    const int64_t numel = c10::multiply_integers(sizes);
    if (!all.defined() || all.dtype() != options.dtype()) {
      all = torch::full(
          {meter_.on_gpu() ? kLargestOfGpu : kLargestOfProcessor}, 0.5,
          options);
    }
    return all.narrow(0, 0, numel).view(sizes);
  }

  BenchMeter& meter_;
  std::array<std::array<Tensor, 2>, 3> buffers_;
  std::vector<MatrixRate> rates_;
  std::vector<std::function<void()>> calls_;
};

}  // namespace

std::vector<MatrixRate> bench_matmuls(BenchMeter& meter) {
  Matmuls matmuls(meter);
  if (meter.on_gpu()) {
    for (const auto& [precision, dtype] :
         {std::tuple(Precision::fp32, torch::kFloat32),
          std::tuple(Precision::bf16, torch::kBFloat16),
          std::tuple(Precision::fp16, torch::kFloat16)}) {
      matmuls.matmuls(precision, dtype, kGpuRows, kGpuSides);
    }
    return matmuls.rates();
  }
  matmuls.matmuls(
      Precision::fp32, torch::kFloat32, kProcessorRows, kProcessorSides);
  matmuls.matmuls(
      Precision::bf16, torch::kBFloat16, kLowProcessorRows, kLowProcessorSides);
  for (const auto& [in, out] :
       {std::tuple(1, 16), std::tuple(3, 16), std::tuple(16, 32),
        std::tuple(64, 64), std::tuple(256, 256)}) {
    for (int64_t side : {2, 4, 8, 28, 112}) {
      if (in == 256 && side == 112) continue;
      matmuls.convolution(16, in, out, side);
    }
  }
  for (int64_t length : {64, 256, 1024}) {
    for (int64_t size : {32, 128}) matmuls.attention(8, length, size);
  }
  return matmuls.rates();
}

}  // namespace echelon
