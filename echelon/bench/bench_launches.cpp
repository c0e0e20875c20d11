// The cost of launching an operator is found with two small networks, one with
// many views and one with few. Their seconds are two linear equations in two
// unknowns, the cost of a view and that of an operator that computes.
#include "echelon/bench/bench_rates.h"

#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <utility>

#include "echelon/counting/layer_cost.h"
#include "echelon/models/make_network.h"
#include "echelon/text/format.h"

namespace echelon::bench {
namespace {

using torch::Tensor;
using Clock = std::chrono::steady_clock;

constexpr int64_t kLaunchRounds = 21;
// Bytes that the neighbours of an operator move.
constexpr std::array<int64_t, 4> kBytesBeside = {
    0, int64_t{32} << 10, int64_t{256} << 10, int64_t{1} << 20};
const std::vector<int64_t> kSmall = {16};  // features of small networks

double seconds_from(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Layers whose operators compute next to nothing. Between them, in forward and
// backward, it moves other memory, as larger operators would; that time is not
// counted.
class SmallNetwork {
 public:
  SmallNetwork(const LayerList& layers, torch::Device device)
      : input_(torch::ones({4, 16}, torch::device(device))),
        memory_(torch::zeros({kMostBeside / 4}, torch::device(device))) {
    for (const auto& layer :
         counting::count_operators(layers, {{{4, 16}}}).layers) {
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

  // Bytes for each operator.
  void move_beside(int64_t bytes) { bytes_ = bytes; }

  // Returns the seconds of the layers alone.
  double run(bool backward) {
    const torch::AutoGradMode gradients(true);
    beside_seconds_ = 0;
    // Accumulating into gradients would take operators of its own.
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

  static void count(
      const std::vector<counting::OperatorWork>& operators,
      OperatorCounts& counts) {
    for (const auto& work : operators) {
      const bool computes = work.bytes > 0 || !work.product.empty();
      (computes ? counts.computing : counts.views) += 1;
    }
  }

  static int64_t operators_of(const OperatorCounts& counts) {
    return static_cast<int64_t>(counts.computing + counts.views);
  }

  // Moves what so many operators would; not always the same memory, as in a
  // network.
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

// The trainer's linear layers launch more views than operators that compute.
LayerList many_views() {
  ModelOptions options;
  options.name = "mlp";
  options.hidden = {16, 16, 16};
  return model_layers(options, kSmall, 16);
}

// Elementwise functions launch next to no views.
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
      layers.add_function(format("f{}", at), functions[k]);
    }
  }
  return layers;
}

}  // namespace

Launches fit_launches(
    const OperatorCounts& a, double a_seconds, const OperatorCounts& b,
    double b_seconds) {
  const double determinant = a.computing * b.views - b.computing * a.views;
  const double view =
      (a.computing * b_seconds - b.computing * a_seconds) / determinant;
  const double computing =
      (a_seconds * b.views - b_seconds * a.views) / determinant;
  if (view > 0 && computing > 0) return {computing, view};
  const double each =
      (a_seconds + b_seconds) / (a.computing + a.views + b.computing + b.views);
  return {each, each};
}

std::vector<cluster::LaunchRate> bench_launches(BenchMeter& meter) {
  SmallNetwork views(many_views(), meter.device());
  SmallNetwork functions(few_views(), meter.device());
  std::vector<std::function<double()>> calls;  // four for each kBytesBeside
  for (const int64_t bytes : kBytesBeside) {
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
  std::vector<cluster::LaunchRate> rates;
  for (size_t i = 0; i < calls.size(); i += 4) {
    std::array<double, 4> usual{};
    for (size_t k = 0; k < 4; ++k) usual[k] = median(std::move(seconds[i + k]));
    const Launches forward =
        fit_launches(views.forward(), usual[0], functions.forward(), usual[2]);
    const Launches backward = fit_launches(
        views.backward(), usual[1], functions.backward(), usual[3]);
    rates.push_back(
        {.bytes_beside = static_cast<double>(kBytesBeside[i / 4]),
         .seconds = forward.computing,
         .backward_seconds = backward.computing,
         .view_seconds = forward.view,
         .backward_view_seconds = backward.view});
  }
  return rates;
}

}  // namespace echelon::bench
