// SGD, Adam and AdamW on fused kernels, our own on CUDA GPUs (kernels/update.h)
// and ATen's elsewhere: one call updates a whole group of parameters, several
// times as fast as torch::optim. The learning rate over a run: warm-up, then
// constant, cosine, linear or step.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "echelon/options/optimizer.h"

namespace echelon {

using NamedTensors = std::vector<std::pair<std::string, torch::Tensor>>;

/// Parameters that share their settings.
struct ParameterGroup {
  NamedTensors parameters;
  double learning_rate_factor = 1.0;  // times the optimizer's learning rate
  double weight_decay = 0.0;
};

/// One kind of an optimizer's state.
struct OptimizerStateKind {
  std::string name;
  bool is_number = false;  // one number; else of the parameter's shape
};

/// How zero_grad() clears gradients.
enum class ZeroGrad {
  set_to_none,  // frees them; the next backward pass makes new ones
  in_place,     // for gradients that are views of a bucket
};

/// Updates parameters from their gradients. It is not thread-safe; each rank
/// has its own, and equal gradients give equal parameters.
///
/// A parameter without a gradient is skipped: no decay, no step counted, as in
/// PyTorch. All tensors of a parameter's state have its dtype and device.
class Optimizer {
 public:
  virtual ~Optimizer() = default;

  /// One update with the current gradients. Throws ConfigError for a sparse
  /// gradient.
  ///
  /// The host does not wait for a device's `skip` and `factor`:
  ///
  ///   skip    a float32 scalar on any device: 1 leaves parameters and state as
  ///           they are, as if step() had not been called, and 0 does not;
  ///           undefined: 0
  ///   factor  a float64 scalar on any device by which gradients are multiplied
  ///           before all else: clip_factor(), the inverse of a loss scale;
  ///           undefined: 1. Our kernels multiply as they read. ATen's do not,
  ///           so the gradients themselves are multiplied there: with a factor,
  ///           nothing may read them afterwards.
  void step(const torch::Tensor& skip = {}, const torch::Tensor& factor = {});

  void zero_grad(ZeroGrad how = ZeroGrad::set_to_none);

  /// For schedules: learning_rate * LearningRateSchedule::factor(step), before
  /// step(). Devices that are not CPUs get it as a float32, unless parameters
  /// are float64.
  void set_learning_rate(double rate);
  double learning_rate() const { return learning_rate_; }

  const std::vector<ParameterGroup>& groups() const { return groups_; }
  /// The parameters of all groups, in order; for clip_gradients().
  std::vector<torch::Tensor> parameters() const;

  /// The state by "PARAMETER/KIND": "conv1.weight/exp_avg", …/exp_avg_sq and
  /// …/step (adam, adamw), …/momentum (sgd with momentum). These are the
  /// optimizer's own tensors. They all exist from the start, as zeros, so a
  /// checkpoint can write them and load_state() can fill them in place.
  virtual NamedTensors state() const = 0;
  /// The kinds of state(), even if there are no parameters.
  virtual std::vector<OptimizerStateKind> state_kinds() const = 0;
  /// Copies values into state(). Throws CheckpointError that lists every name
  /// that is missing, unknown or of another shape, and then changes nothing.
  void load_state(const NamedTensors& values);

 protected:
  Optimizer(std::vector<ParameterGroup> groups, double learning_rate);

  /// The parameters of one group, dtype and device that have gradients;
  /// `indices` are their places in parameters().
  struct Batch {
    std::vector<torch::Tensor> parameters;
    std::vector<torch::Tensor> gradients;
    std::vector<size_t> indices;
  };
  /// A number of the host, or, while a CUDA graph is captured, a float32 scalar
  /// on the device: a replay reads the rate of its own step there.
  using Rate = std::variant<double, torch::Tensor>;
  /// How a batch is updated; tensors are float32 scalars on its device.
  struct How {
    Rate learning_rate;
    double weight_decay = 0;
    std::optional<torch::Tensor> skip;
    bool by_our_kernels = false;
    std::optional<torch::Tensor> factor;  // for our kernels alone
  };
  virtual void update(const Batch& batch, const How& how) = 0;

 private:
  Rate rate_of(const Batch& batch, double factor);

  std::vector<ParameterGroup> groups_;
  double learning_rate_;
  /// By the groups' factors, for graphs, which are of one device.
  std::map<double, torch::Tensor> rates_;
};

/// sgd, adam or adamw by options.name, over groups that the caller chose
/// (options.weight_decay is not read). Throws ConfigError for an unknown name,
/// a setting out of range, a name or a tensor that occurs twice, or a parameter
/// that is not dense floating-point memory.
///
///   sgd    g += wd p;  m = momentum m + g;  p -= lr m, with nesterov
///          p -= lr (g + momentum m)
///   adam   g += wd p, then Kingma and Ba, 2014, arXiv:1412.6980
///   adamw  p -= lr wd p, then Adam: Loshchilov and Hutter, 2017,
///          arXiv:1711.05101
std::unique_ptr<Optimizer> make_optimizer(
    const OptimizerOptions& options, std::vector<ParameterGroup> groups);

/// Two groups: `weight_decay` for parameters of two and more dimensions, none
/// for biases and the parameters of norms.
std::vector<ParameterGroup>
parameter_groups(const NamedTensors& parameters, double weight_decay);

/// The same, over parameter_groups(parameters, options.decay()).
std::unique_ptr<Optimizer>
make_optimizer(const OptimizerOptions& options, const NamedTensors& parameters);

/// The same for all parameters of a module. One that is registered under two
/// names (tied) is taken once, under its first name.
std::unique_ptr<Optimizer> make_optimizer(
    const OptimizerOptions& options, const torch::nn::Module& module);

/// The factor of the optimizer's learning rate in each step. A value.
///
/// With w warm-up steps and T steps in all, the factor of step s (from 0) is
///   s <  w   (s + 1) / (w + 1)
///   s >= w   with p = (s - w) / (T - w), f = final_factor:
///     constant  1
///     linear    1 + (f - 1) p
///     cosine    f + (1 - f) (1 + cos(pi p)) / 2
///     step      step_factor ^ floor((s - w) / step_every)
/// A step beyond T has the factor of T.
/// Source of the cosine schedule: Loshchilov and Hutter, "SGDR", 2016,
/// arXiv:1608.03983.
class LearningRateSchedule {
 public:
  /// Reads schedule, warmup_steps, final_factor, step_every, step_factor.
  /// Throws ConfigError with the values for a warm-up that is not shorter than
  /// the run, a `step` without step_every, or a factor that is negative or not
  /// finite.
  LearningRateSchedule(const OptimizerOptions& options, int64_t total_steps);

  double factor(int64_t step) const;

 private:
  OptimizerOptions options_;
  int64_t total_steps_;
};

}  // namespace echelon
