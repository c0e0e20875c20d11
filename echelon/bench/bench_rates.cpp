// A rate is the FLOPs or the bytes of a call over its time without the launch
// overhead. On a processor the smallest call's time is that overhead, and is
// subtracted; a GPU computes while the host launches the next operator, so that
// nothing is. A floor on what is left keeps noise from making a rate infinite.
// Operators have the names and bytes that counting/ gives them, so that a
// prediction finds the rate of what it counted.
#include "echelon/bench/bench_rates.h"

#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <array>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "echelon/counting/meta_mode.h"
#include "echelon/counting/operator_work.h"
#include "echelon/kernels/update.h"

namespace echelon::bench {
namespace {

using torch::Tensor;

// --- Matmuls

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
  std::vector<cluster::MatrixRate> rates() {
    calls_.push_back(smallest_call(meter_.device()));
    const auto seconds = meter_.seconds_of(calls_);
    // A GPU computes while the host launches the next operator.
    const double start = meter_.on_gpu() ? 0 : seconds.back();
    for (size_t i = 0; i < rates_.size(); ++i) {
      // Until now the field has the FLOPs of the call.
      rates_[i].flops_per_second /=
          std::max(seconds[i] - start, seconds[i] / 4);
    }
    return std::move(rates_);
  }

  void matmuls(
      cluster::Precision precision, torch::Dtype dtype,
      const std::vector<int64_t>& rows, const std::vector<int64_t>& sides) {
    const auto options = torch::dtype(dtype).device(meter_.device());
    for (int64_t m : rows) {
      for (int64_t n : sides) {
        for (int64_t k : sides) {
          const Tensor a = buffer(0, {m, k}, options);
          // Linear layers keep weights as [out, in], so the second factor is a
          // transposed view.
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
    // y has the memory format that the kernel chooses.
    const Tensor y = torch::conv2d(x, weight, {}, 1, 1);
    const cluster::MatrixRate shape{
        cluster::Precision::fp32, images * side * side, out, in * 9};
    add(
        shape, 1, [=] { torch::conv2d(x, weight, {}, 1, 1); },
        cluster::ProductKind::convolution);
    for (const bool inputs : {true, false}) {
      const auto gradients = [=] {
        torch::convolution_backward(
            y, x, weight, std::nullopt, {1, 1}, {1, 1}, {1, 1}, false, {0, 0},
            1, {inputs, !inputs, false});
      };
      add(shape, 1, gradients,
          inputs ? cluster::ProductKind::convolution_inputs
                 : cluster::ProductKind::convolution_weights);
    }
  }

  // Causal, with `heads` heads over all samples.
  void attention(int64_t heads, int64_t length, int64_t size) {
    const Tensor x =
        torch::full({1, heads, length, size}, 0.5, meter_.device());
    const cluster::MatrixRate shape{
        cluster::Precision::fp32, length, length, size};
    const auto [y, sums] =
        at::_scaled_dot_product_flash_attention_for_cpu(x, x, x, 0.0, true);
    add(
        shape, heads,
        [=] {
          at::_scaled_dot_product_flash_attention_for_cpu(x, x, x, 0.0, true);
        },
        cluster::ProductKind::attention);
    add(
        shape, heads,
        [x, y = y, sums = sums] {
          at::_scaled_dot_product_flash_attention_for_cpu_backward(
              x, x, x, x, y, sums, 0.0, true);
        },
        cluster::ProductKind::attention_gradients);
  }

 private:
  void
  add(cluster::MatrixRate rate, int64_t count, std::function<void()> call,
      cluster::ProductKind kind = cluster::ProductKind::product) {
    rate.kind = kind;
    rate.flops_per_second =
        static_cast<double>(count) * cluster::product_flops(
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
  std::vector<cluster::MatrixRate> rates_;
  std::vector<std::function<void()>> calls_;
};

// --- Operators bound by memory

// Observes a call and keeps the operator that moves the most bytes.
class Largest : public counting::detail::OperatorObserver {
 public:
  bool counts_whole(const std::string&) const override { return false; }
  void
  ran(const std::string& op, const std::vector<c10::IValue>& arguments,
      at::ArrayRef<c10::IValue> results) override {
    for (auto& work : counting::operator_work(op, arguments, results)) {
      if (work.bytes > largest.bytes) largest = std::move(work);
    }
  }
  counting::OperatorWork largest;
};

counting::OperatorWork largest_of(const std::function<void()>& call) {
  Largest observer;
  const counting::detail::MetaMode mode(&observer);
  call();
  return observer.largest;
}

class Operators {
 public:
  explicit Operators(BenchMeter& meter) : meter_(meter) {
    calls_.push_back(smallest_call(meter.device()));
  }

  // Measures all calls.
  std::vector<cluster::OperatorRate> rates() {
    const auto seconds = meter_.seconds_of(calls_);
    // A GPU computes while the host launches the next operator.
    const double start = meter_.on_gpu() ? 0 : seconds.front();
    for (size_t i = 0; i < rates_.size(); ++i) {
      const double all = seconds[call_of_[i]];
      const double own = all - (without_[i] ? seconds[*without_[i]] : start);
      rates_[i].bytes_per_second =
          rates_[i].bytes / std::max(own, all * (without_[i] ? 0.02 : 0.25));
    }
    return std::move(rates_);
  }

  // The operator has the name and the bytes with which it is counted.
  void add(std::function<void()> call) {
    const counting::OperatorWork work = largest_of(call);
    add(work.name, work.bytes, std::move(call));
  }

  void add(const std::string& name, double bytes, std::function<void()> call) {
    rates_.push_back({name, bytes, 0});
    without_.emplace_back();
    call_of_.push_back(calls_.size());
    calls_.push_back(std::move(call));
  }

  // How much longer `call` takes than `without`, for work without a call of its
  // own.
  void add_difference(
      const std::string& name, double bytes, std::function<void()> call,
      std::function<void()> without) {
    add(name, bytes, std::move(call));
    without_.back() = calls_.size();
    calls_.push_back(std::move(without));
  }

  // Random values like those of data: branches on equal elements are faster.
  Tensor drawn(at::IntArrayRef sizes) const {
    return torch::randn(sizes, meter_.device());
  }

 private:
  BenchMeter& meter_;
  std::vector<cluster::OperatorRate> rates_;
  std::vector<size_t> call_of_;                 // by rate
  std::vector<std::optional<size_t>> without_;  // by rate: the call to subtract
  std::vector<std::function<void()>> calls_;
};

// Elementwise operators on `numel` elements.
void add_elementwise(Operators& operators, int64_t numel) {
  const Tensor a = operators.drawn({numel}), b = operators.drawn({numel});
  operators.add([=] { a + b; });
  operators.add([=] { a* b; });
  operators.add([=] { a.clone(); });
  operators.add([=] { at::relu(a); });
  operators.add([=] { at::threshold_backward(a, b, 0); });
  operators.add([=] { at::gelu(a, "tanh"); });
  operators.add([=] { at::gelu_backward(a, b, "tanh"); });
  operators.add([=] { at::silu(a); });
  operators.add([=] { at::silu_backward(a, b); });
  operators.add([=] { at::tanh(a); });
  operators.add([=] { at::exp(a); });
}

// Operators on rows of `width` elements, `numel` in all.
void add_by_rows(Operators& operators, int64_t numel, int64_t width) {
  const int64_t rows = numel / width;
  const Tensor x = operators.drawn({rows, width});
  const Tensor g = operators.drawn({rows, width});
  const Tensor w = operators.drawn({width});
  operators.add([=] { x.sum(0, /*keepdim=*/true); });
  const auto [y, mean, scale] = at::native_layer_norm(x, {width}, w, w, 1e-5);
  operators.add([=] { at::native_layer_norm(x, {width}, w, w, 1e-5); });
  operators.add([=, mean = mean, scale = scale] {
    at::native_layer_norm_backward(
        g, x, {width}, mean, scale, w, w, {true, true, true});
  });
  const Tensor logarithms = at::_log_softmax(x, 1, false);
  operators.add([=] { at::_log_softmax(x, 1, false); });
  operators.add([=] {
    at::_log_softmax_backward_data(g, logarithms, 1, torch::kFloat32);
  });
  const Tensor classes = torch::arange(rows, torch::device(x.device())) % width;
  const auto [loss, weights] =
      at::nll_loss_forward(logarithms, classes, std::nullopt, 2, -100);
  operators.add([=] {
    at::nll_loss_forward(logarithms, classes, std::nullopt, 2, -100);
  });
  operators.add([=, loss = loss, weights = weights] {
    at::nll_loss_backward(
        loss, logarithms, classes, std::nullopt, 2, -100, weights);
  });
  const Tensor table = operators.drawn({256, width});
  const Tensor tokens = torch::arange(rows, torch::device(x.device())) % 256;
  operators.add([=] { at::embedding(table, tokens); });
  operators.add(
      [=] { at::embedding_dense_backward(x, tokens, 256, -1, false); });
}

// Operators on images of 16 channels, `numel` elements in all.
void add_by_images(
    Operators& operators, int64_t numel, torch::MemoryFormat order) {
  const int64_t side = numel < 16 * 256 ? 4 : 16;
  // Pooling branches on each pixel, so the images are the output of a ReLU, as
  // in networks.
  const Tensor x = operators.drawn({numel / (16 * side * side), 16, side, side})
                       .relu()
                       .contiguous(order);
  const auto [y, places] = at::max_pool2d_with_indices(x, 2);
  operators.add([=] { at::max_pool2d_with_indices(x, 2); });
  operators.add([=, y = y, places = places] {
    at::max_pool2d_with_indices_backward(
        y, x, {2, 2}, {2, 2}, {0, 0}, {1, 1}, false, places);
  });
  // The gradient of a bias is computed with that of the weights.
  const Tensor weight = operators.drawn({16, 16, 1, 1});
  const auto gradients = [=](bool weights, bool bias) {
    return [=] {
      at::convolution_backward(
          x, x, weight, std::nullopt, {1, 1}, {0, 0}, {1, 1}, false, {0, 0}, 1,
          {false, weights, bias});
    };
  };
  const counting::OperatorWork work = largest_of(gradients(false, true));
  operators.add_difference(
      work.name, work.bytes, gradients(true, true), gradients(true, false));
  const Tensor g = x.clone();
  const Tensor w = operators.drawn({16}).abs(), mean = operators.drawn({16});
  const auto [z, own_mean, own_scale] =
      at::native_batch_norm(x, w, w, mean, mean, true, 0.1, 1e-5);
  operators.add(
      [=] { at::native_batch_norm(x, w, w, mean, mean, true, 0.1, 1e-5); });
  operators.add([=, own_mean = own_mean, own_scale = own_scale] {
    at::native_batch_norm_backward(
        g, x, w, mean, mean, own_mean, own_scale, true, 1e-5,
        {true, true, true});
  });
}

// The update of one parameter: bytes read and written of it, its gradient and
// its state.
void add_optimizers(Operators& operators, int64_t numel) {
  const Tensor p = operators.drawn({numel}), g = operators.drawn({numel});
  const Tensor m = operators.drawn({numel}), v = operators.drawn({numel}).abs();
  const Tensor step = torch::ones({}, p.options());
  const double bytes = static_cast<double>(p.nbytes());
  // AdamW reads the parameter, the gradient and two moments, and writes all but
  // the gradient. SGD reads the first two and writes the parameter.
  const std::vector<Tensor> parameters = {p}, gradients = {g}, means = {m},
                            squares = {v}, steps = {step};
  const bool ours = kernels::takes_update(p);
  operators.add("optimizer adamw", 7 * bytes, [=] {
    if (ours) {
      return kernels::update_by_adam(
          {parameters, gradients}, means, squares, steps, {.rate = 1e-9},
          {.beta1 = 0.9, .beta2 = 0.99, .epsilon = 1e-8, .decoupled = true});
    }
    at::_fused_adamw_(
        parameters, gradients, means, squares, {}, steps, 1e-9, 0.9, 0.99, 0.0,
        1e-8, false, false);
  });
  operators.add("optimizer sgd", 3 * bytes, [=] {
    if (ours) {
      return kernels::update_by_sgd(
          {parameters, gradients}, {}, {.rate = 1e-9}, {});
    }
    at::_foreach_add_(parameters, gradients, 1e-9);
  });
}

}  // namespace

std::vector<cluster::MatrixRate> bench_matmuls(BenchMeter& meter) {
  Matmuls matmuls(meter);
  if (meter.on_gpu()) {
    for (const auto& [precision, dtype] :
         {std::tuple(cluster::Precision::fp32, torch::kFloat32),
          std::tuple(cluster::Precision::bf16, torch::kBFloat16),
          std::tuple(cluster::Precision::fp16, torch::kFloat16)}) {
      matmuls.matmuls(precision, dtype, kGpuRows, kGpuSides);
    }
    return matmuls.rates();
  }
  matmuls.matmuls(
      cluster::Precision::fp32, torch::kFloat32, kProcessorRows,
      kProcessorSides);
  matmuls.matmuls(
      cluster::Precision::bf16, torch::kBFloat16, kLowProcessorRows,
      kLowProcessorSides);
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

std::vector<cluster::OperatorRate> bench_operators(BenchMeter& meter) {
  Operators operators(meter);
  for (int64_t numel : {1 << 8, 1 << 11, 1 << 14, 1 << 18, 1 << 22}) {
    add_elementwise(operators, numel);
    add_by_rows(operators, numel, 256);
    add_by_images(operators, numel, torch::MemoryFormat::Contiguous);
    add_by_images(operators, numel, torch::MemoryFormat::ChannelsLast);
    add_optimizers(operators, numel);
  }
  return operators.rates();
}

std::function<void()> smallest_call(torch::Device device) {
  const Tensor a = torch::ones({16}, torch::device(device));
  return [a] { a + a; };
}

}  // namespace echelon::bench
