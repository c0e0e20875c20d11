#include "echelon/bench/bench_operators.h"

#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "echelon/bench/bench_fits.h"
#include "echelon/counting/layer_operators.h"
#include "echelon/counting/meta_mode.h"
#include "echelon/counting/operator_work.h"
#include "echelon/models/make_network.h"

namespace echelon {
namespace {

using torch::Tensor;

constexpr int64_t kLaunchRounds = 21;
// What those around an operator move.
constexpr std::array<int64_t, 4> kBeside = {
    0, int64_t{32} << 10, int64_t{256} << 10, int64_t{1} << 20};
const std::vector<int64_t> kSmall = {16};  // features of small networks

// The work of the operator that moves most of those that a call runs.
class Largest : public detail::OperatorObserver {
 public:
  bool counts_whole(const std::string&) const override { return false; }
  void
  ran(const std::string& op, const std::vector<c10::IValue>& arguments,
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
  explicit Operators(BenchMeter& meter) : meter_(meter) {
    calls_.push_back(smallest_call(meter.device()));
  }

  // Measured.
  std::vector<OperatorRate> rates() {
    const auto seconds = meter_.seconds_of(calls_);
    // A GPU computes while the next operator is started.
    const double start = meter_.on_gpu() ? 0 : seconds.front();
    for (size_t i = 0; i < rates_.size(); ++i) {
      const double all = seconds[call_of_[i]];
      const double own = all - (without_[i] ? seconds[*without_[i]] : start);
      rates_[i].bytes_per_second =
          rates_[i].bytes / std::max(own, all * (without_[i] ? 0.02 : 0.25));
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
    without_.emplace_back();
    call_of_.push_back(calls_.size());
    calls_.push_back(std::move(call));
  }

  // What `call` takes longer than `without`: work that has no call of its own.
  void add_difference(
      const std::string& name, double bytes, std::function<void()> call,
      std::function<void()> without) {
    add(name, bytes, std::move(call));
    without_.back() = calls_.size();
    calls_.push_back(std::move(without));
  }

  // Values like those of data: branches on elements that are all alike are
  // quicker.
  Tensor drawn(at::IntArrayRef sizes) const {
    return torch::randn(sizes, meter_.device());
  }

 private:
  BenchMeter& meter_;
  std::vector<OperatorRate> rates_;
  std::vector<size_t> call_of_;                 // by rate
  std::vector<std::optional<size_t>> without_;  // by rate: the call to take off
  std::vector<std::function<void()>> calls_;
};

// One by one, of `numel` elements.
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

// Rows of `width`, `numel` elements in all.
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
  const Tensor words = torch::arange(rows, torch::device(x.device())) % 256;
  operators.add([=] { at::embedding(table, words); });
  operators.add(
      [=] { at::embedding_dense_backward(x, words, 256, -1, false); });
}

// Images of 16 channels, in either order of memory; `numel` elements in all.
void add_by_images(
    Operators& operators, int64_t numel, torch::MemoryFormat order) {
  const int64_t side = numel < 16 * 256 ? 4 : 16;
  // Pooling takes a branch for each pixel: of what a ReLU leaves, as in
  // networks.
  const Tensor x = operators.drawn({numel / (16 * side * side), 16, side, side})
                       .relu()
                       .contiguous(order);
  const auto [y, places] = at::max_pool2d_with_indices(x, 2);
  operators.add([=] { at::max_pool2d_with_indices(x, 2); });
  operators.add([=, y = y, places = places] {
    at::max_pool2d_with_indices_backward(
        y, x, {2, 2}, {2, 2}, {0, 0}, {1, 1}, false, places);
  });
  // Of a bias: a part of the gradient of the weights.
  const Tensor weight = operators.drawn({16, 16, 1, 1});
  const auto gradients = [=](bool bias) {
    return [=] {
      at::convolution_backward(
          x, x, weight, std::nullopt, {1, 1}, {0, 0}, {1, 1}, false, {0, 0}, 1,
          {false, true, bias});
    };
  };
  const OperatorWork work = largest_of([=] {
    at::convolution_backward(
        x, x, weight, std::nullopt, {1, 1}, {0, 0}, {1, 1}, false, {0, 0}, 1,
        {false, false, true});
  });
  operators.add_difference(
      work.name, work.bytes, gradients(true), gradients(false));
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

// One parameter's update: what is read and written of it, its gradient and its
// state.
void add_optimizers(Operators& operators, int64_t numel) {
  const Tensor p = operators.drawn({numel}), g = operators.drawn({numel});
  const Tensor m = operators.drawn({numel}), v = operators.drawn({numel}).abs();
  const Tensor step = torch::ones({}, p.options());
  const double bytes = static_cast<double>(p.nbytes());
  operators.add("optimizer adamw", 7 * bytes, [=] {
    at::_fused_adamw_(
        {p}, {g}, {m}, {v}, {}, {step}, 1e-9, 0.9, 0.99, 0.0, 1e-8, false,
        false);
  });
  const std::vector<Tensor> parameters = {p}, gradients = {g};
  operators.add("optimizer sgd", 3 * bytes, [=] {
    at::_foreach_add_(parameters, gradients, 1e-9);
  });
}

using Clock = std::chrono::steady_clock;

double seconds_from(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Layers whose operators compute next to nothing. Between them, forwards and
// backwards, other memory is read, as much as larger operators would: its time
// is not theirs.
class SmallNetwork {
 public:
  SmallNetwork(const LayerList& layers, torch::Device device)
      : input_(torch::ones({4, 16}, torch::device(device))),
        memory_(torch::zeros({kMostBeside / 4}, torch::device(device))) {
    for (const auto& layer : count_operators(layers, {{{4, 16}}}).layers) {
      count(layer.forward, forward_);
      count(layer.backward, backward_);
    }
    for (const auto& layer : layers.layers()) {
      built_.push_back(layer.build());
      if (built_.back().module) built_.back().module->to(device);
    }
  }

  const OperatorCounts& forward() const { return forward_; }
  const OperatorCounts& backward() const { return backward_; }

  // For each operator.
  void move_beside(int64_t bytes) { bytes_ = bytes; }

  // Its own seconds.
  double run(bool backward) {
    const torch::AutoGradMode gradients(true);
    beside_seconds_ = 0;
    // Gradients that are added up are operators of their own.
    for (const auto& layer : built_) {
      if (layer.module) layer.module->zero_grad();
    }
    const auto begin = Clock::now();
    Tensors values = {input_};
    for (const auto& layer : built_) {
      values = layer.forward(values);
      const auto share = static_cast<int64_t>(built_.size());
      move(operators_of(forward_) / share);
      if (!backward || bytes_ == 0) continue;
      values[0].register_hook([this, share](const Tensor& gradient) {
        move(operators_of(backward_) / share);
        return gradient;
      });
    }
    if (backward) values[0].backward(torch::ones_like(values[0]));
    return seconds_from(begin) - beside_seconds_;
  }

 private:
  static constexpr int64_t kMostBeside = int64_t{16} << 20;

  static void
  count(const std::vector<OperatorWork>& operators, OperatorCounts& counts) {
    for (const auto& work : operators) {
      const bool computes = work.bytes > 0 || !work.product.empty();
      (computes ? counts.computing : counts.views) += 1;
    }
  }

  static int64_t operators_of(const OperatorCounts& counts) {
    return static_cast<int64_t>(counts.computing + counts.views);
  }

  // What `operators` would. Not always the same memory, as in a network.
  void move(int64_t operators) {
    if (bytes_ == 0) return;
    const auto begin = Clock::now();
    const torch::NoGradGuard no_grad;
    const int64_t numel = std::min(kMostBeside, operators * bytes_) / 4;
    if ((next_ + numel) * 4 > kMostBeside) next_ = 0;
    memory_.narrow(0, next_, numel).add_(1);
    next_ += numel;
    beside_seconds_ += seconds_from(begin);
  }

  Tensor input_, memory_;
  OperatorCounts forward_, backward_;
  std::vector<BuiltLayer> built_;
  int64_t bytes_ = 0, next_ = 0;
  double beside_seconds_ = 0;
};

// The linear layers of the trainer start more views than operators that compute
// ...
LayerList many_views() {
  ModelOptions options;
  options.name = "mlp";
  options.hidden = {16, 16, 16};
  return model_layers(options, kSmall, 16);
}

// ... and a function of one element next to none.
LayerList few_views() {
  using Function = Tensor (*)(const Tensor&);
  const std::array<Function, 4> functions = {
      [](const Tensor& x) { return at::gelu(x, "tanh"); },
      [](const Tensor& x) { return at::relu(x); },
      [](const Tensor& x) { return at::silu(x); },
      [](const Tensor& x) { return at::tanh(x); }};
  ModelOptions options;
  options.name = "mlp";  // gradients begin at its weights
  options.hidden = {16};
  LayerList layers = model_layers(options, kSmall, 16);
  for (int i = 0; i < 4; ++i) {
    for (size_t k = 0; k < functions.size(); ++k) {
      const auto at = static_cast<size_t>(i) * functions.size() + k;
      layers.add_function("f" + std::to_string(at), functions[k]);
    }
  }
  return layers;
}

}  // namespace

std::vector<OperatorRate> bench_operators(BenchMeter& meter) {
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

std::vector<LaunchRate> bench_launches(BenchMeter& meter) {
  SmallNetwork views(many_views(), meter.device());
  SmallNetwork functions(few_views(), meter.device());
  std::vector<std::function<double()>>
      calls;  // four for each of the bytes beside
  for (const int64_t bytes : kBeside) {
    for (SmallNetwork* network : {&views, &functions}) {
      for (const bool backward : {false, true}) {
        calls.push_back([=] {
          network->move_beside(bytes);
          return network->run(backward);
        });
      }
    }
  }
  std::vector<std::vector<double>> seconds(calls.size());
  for (const auto& round :
       meter.rounds_of_own_seconds(calls, 4, kLaunchRounds)) {
    for (size_t i = 0; i < calls.size(); i += 2) {
      const double forward = round[i], both = round[i + 1];
      seconds[i].push_back(forward);
      seconds[i + 1].push_back(std::max(both - forward, both / 4));
    }
  }
  std::vector<LaunchRate> rates;
  for (size_t i = 0; i < calls.size(); i += 4) {
    std::array<double, 4> usual{};
    for (size_t k = 0; k < 4; ++k) usual[k] = median(std::move(seconds[i + k]));
    const Launches forward =
        fit_launches(views.forward(), usual[0], functions.forward(), usual[2]);
    const Launches backward = fit_launches(
        views.backward(), usual[1], functions.backward(), usual[3]);
    rates.push_back(
        {.bytes_beside = static_cast<double>(kBeside[i / 4]),
         .seconds = forward.computing,
         .backward_seconds = backward.computing,
         .view_seconds = forward.view,
         .backward_view_seconds = backward.view});
  }
  return rates;
}

}  // namespace echelon
