#include "echelon/train/bench_operators.h"

#include <torch/torch.h>

#include <algorithm>
#include <utility>

#include "echelon/models/layer_operators.h"
#include "echelon/models/meta_mode.h"
#include "echelon/models/operator_work.h"

namespace echelon {
namespace {

using torch::Tensor;

// The work of the operator that moves most of those that a call runs.
class Largest : public detail::OperatorObserver {
 public:
  bool counts_whole(const std::string&) const override { return false; }
  void ran(
      const std::string& op,
      const std::vector<c10::IValue>& arguments,
      at::ArrayRef<c10::IValue> results) override {
    for (auto& work : operator_work(op, arguments, results)) {
      if (work.bytes > largest.bytes) largest = std::move(work);
    }
  }
  OperatorWork largest;
};

OperatorWork largest_of(const std::function<void()>& call) {
  Largest observer;
  const detail::MetaMode mode(&observer);
  call();
  return observer.largest;
}

class Operators {
 public:
  Operators(BenchMeter& meter, double start_seconds)
      : meter_(meter), start_seconds_(start_seconds) {}

  // Measured.
  std::vector<OperatorRate> rates() {
    const auto seconds = meter_.seconds_of(calls_);
    for (size_t i = 0; i < rates_.size(); ++i) {
      rates_[i].bytes_per_second =
          rates_[i].bytes / std::max(seconds[i] - start_seconds_, seconds[i] / 4);
    }
    return std::move(rates_);
  }

  // As operators are counted.
  void add(std::function<void()> call) {
    const OperatorWork work = largest_of(call);
    add(work.name, work.bytes, std::move(call));
  }

  void add(const std::string& name, double bytes, std::function<void()> call) {
    rates_.push_back({name, bytes, 0});
    calls_.push_back(std::move(call));
  }

  Tensor filled(at::IntArrayRef sizes) const {
    return torch::full(sizes, 0.5, meter_.device());
  }

 private:
  BenchMeter& meter_;
  double start_seconds_;
  std::vector<OperatorRate> rates_;
  std::vector<std::function<void()>> calls_;
};

// One by one, of `numel` elements.
void add_elementwise(Operators& operators, int64_t numel) {
  const Tensor a = operators.filled({numel}), b = operators.filled({numel});
  operators.add([=] { a + b; });
  operators.add([=] { a * b; });
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

// Rows of `width`, `numel` elements in all.
void add_by_rows(Operators& operators, int64_t numel, int64_t width) {
  const int64_t rows = numel / width;
  const Tensor x = operators.filled({rows, width});
  const Tensor g = operators.filled({rows, width});
  const Tensor w = operators.filled({width});
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
  const Tensor table = operators.filled({256, width});
  const Tensor words = torch::arange(rows, torch::device(x.device())) % 256;
  operators.add([=] { at::embedding(table, words); });
  operators.add(
      [=] { at::embedding_dense_backward(x, words, 256, -1, false); });
}

// Images of 16 channels, in either order of memory; `numel` elements in all.
void add_by_images(
    Operators& operators, int64_t numel, torch::MemoryFormat order) {
  const int64_t side = 16;
  const Tensor x = operators.filled({numel / (16 * side * side), 16, side, side})
                       .contiguous(order);
  const auto [y, places] = at::max_pool2d_with_indices(x, 2);
  operators.add([=] { at::max_pool2d_with_indices(x, 2); });
  operators.add([=, y = y, places = places] {
    at::max_pool2d_with_indices_backward(
        y, x, {2, 2}, {2, 2}, {0, 0}, {1, 1}, false, places);
  });
  const Tensor weight = operators.filled({16, 16, 1, 1});
  operators.add([=] {  // of the bias alone
    at::convolution_backward(
        x, x, weight, std::nullopt, {1, 1}, {0, 0}, {1, 1}, false, {0, 0}, 1,
        {false, false, true});
  });
  const Tensor g = x.clone();
  const Tensor w = operators.filled({16}), mean = operators.filled({16});
  const auto [z, own_mean, own_scale] =
      at::native_batch_norm(x, w, w, mean, mean, true, 0.1, 1e-5);
  operators.add([=] {
    at::native_batch_norm(x, w, w, mean, mean, true, 0.1, 1e-5);
  });
  operators.add([=, own_mean = own_mean, own_scale = own_scale] {
    at::native_batch_norm_backward(
        g, x, w, mean, mean, own_mean, own_scale, true, 1e-5,
        {true, true, true});
  });
}

// One parameter's update: what is read and written of it, its gradient and its state.
void add_optimizers(Operators& operators, int64_t numel) {
  const Tensor p = operators.filled({numel}), g = operators.filled({numel});
  const Tensor m = operators.filled({numel}), v = operators.filled({numel});
  const Tensor step = torch::ones({}, p.options());
  const double bytes = static_cast<double>(p.nbytes());
  operators.add("optimizer adamw", 7 * bytes, [=] {
    at::_fused_adamw_(
        {p}, {g}, {m}, {v}, {}, {step}, 1e-9, 0.9, 0.99, 0.0, 1e-8, false, false);
  });
  const std::vector<Tensor> parameters = {p}, gradients = {g};
  operators.add("optimizer sgd", 3 * bytes, [=] {
    at::_foreach_add_(parameters, gradients, 1e-9);
  });
}

LayerList small_network() {
  LayerList layers;
  for (const char* name : {"0", "1", "2", "3"}) {
    layers.add(
        std::string("fc.") + name, [] { return torch::nn::Linear(16, 16); },
        [](auto& fc, const Tensor& x) { return at::gelu(fc.forward(x)); });
    layers.add(
        std::string("norm.") + name,
        [] {
          return torch::nn::LayerNorm(torch::nn::LayerNormOptions({16}));
        });
  }
  return layers;
}

}  // namespace

std::vector<OperatorRate>
bench_operators(BenchMeter& meter, double start_seconds) {
  Operators operators(meter, start_seconds);
  for (int64_t numel : {1 << 14, 1 << 18, 1 << 22}) {
    add_elementwise(operators, numel);
    add_by_rows(operators, numel, 256);
    add_by_images(operators, numel, torch::MemoryFormat::Contiguous);
    add_by_images(operators, numel, torch::MemoryFormat::ChannelsLast);
    add_optimizers(operators, numel);
  }
  return operators.rates();
}

double bench_start(BenchMeter& meter) {
  const torch::NoGradGuard no_grad;
  const Tensor a = torch::ones({16}, torch::device(meter.device()));
  return meter.seconds_of([&] { a + a; });
}

double bench_launch(BenchMeter& meter) {
  const LayerList layers = small_network();
  size_t operators = 0;
  for (const auto& layer : count_operators(layers, {{{4, 16}}}).layers) {
    operators += layer.forward.size() + layer.backward.size();
  }
  std::vector<BuiltLayer> built;
  std::vector<Tensor> parameters;
  for (const auto& layer : layers.layers()) {
    built.push_back(layer.build());
    built.back().module->to(meter.device());
    for (auto& one : built.back().module->parameters()) parameters.push_back(one);
  }
  const torch::AutoGradMode gradients(true);
  const Tensor x = torch::ones({4, 16}, torch::device(meter.device()));
  const double seconds = meter.seconds_of([&] {
    Tensors values = {x};
    for (const auto& layer : built) values = layer.forward(values);
    values[0].backward(torch::ones_like(values[0]));
    for (auto& one : parameters) one.mutable_grad() = Tensor();
  });
  return seconds / static_cast<double>(operators);
}

}  // namespace echelon
