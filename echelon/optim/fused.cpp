// The optimizers themselves, each a thin layer over one of ATen's kernels.
#include <limits>
#include <sstream>
#include <unordered_set>

#include "echelon/error.h"
#include "echelon/optim/optimizer.h"

namespace echelon {
namespace {

// Zeros in the parameter's memory order, for each parameter.
std::vector<torch::Tensor>
zeros_like_all(const std::vector<torch::Tensor>& parameters) {
  std::vector<torch::Tensor> zeros;
  for (const auto& parameter : parameters) {
    zeros.push_back(torch::zeros_like(parameter).set_requires_grad(false));
  }
  return zeros;
}

std::vector<torch::Tensor> pick(
    const std::vector<torch::Tensor>& all, const std::vector<size_t>& indices) {
  std::vector<torch::Tensor> picked;
  picked.reserve(indices.size());
  for (size_t index : indices) {
    picked.push_back(all[index]);
  }
  return picked;
}

void append_state(
    NamedTensors& state, const std::vector<ParameterGroup>& groups,
    const std::string& kind, const std::vector<torch::Tensor>& tensors) {
  size_t index = 0;
  for (const auto& group : groups) {
    for (const auto& [name, parameter] : group.parameters) {
      state.emplace_back(name + "/" + kind, tensors[index++]);
    }
  }
}

class Sgd : public Optimizer {
 public:
  Sgd(const OptimizerOptions& options, std::vector<ParameterGroup> groups)
      : Optimizer(std::move(groups), options.learning_rate),
        momentum_(options.momentum),
        nesterov_(options.nesterov) {
    if (momentum_ != 0.0) {
      buffers_ = zeros_like_all(parameters());
    }
  }

  NamedTensors state() const override {
    NamedTensors state;
    if (momentum_ != 0.0) {
      append_state(state, groups(), "momentum", buffers_);
    }
    return state;
  }

  std::vector<OptimizerStateKind> state_kinds() const override {
    if (momentum_ == 0.0) return {};
    return {{.name = "momentum"}};
  }

 private:
  void update(const Batch& batch, double rate, double decay) override {
    // A buffer that starts at zero makes the first step like any other:
    // momentum * 0 + g.
    const auto buffers = momentum_ == 0.0 ? std::vector<torch::Tensor>{}
                                          : pick(buffers_, batch.indices);
    const auto& first = batch.parameters.front();
    if (first.is_cpu() && at::isReducedFloatingType(first.scalar_type())) {
      return update_unfused(batch, buffers, rate, decay);
    }
    at::_fused_sgd_(
        batch.parameters, batch.gradients, buffers, decay, momentum_, rate,
        /*dampening=*/0.0, nesterov_,
        /*maximize=*/false,
        /*is_first_step=*/false);
  }

  // LibTorch 2.11's fused kernel leaves blocks of bfloat16 and float16 tensors
  // unchanged on CPUs, without an error.
  void update_unfused(
      const Batch& batch, const std::vector<torch::Tensor>& buffers,
      double rate, double decay) {
    auto gradients = batch.gradients;
    if (decay != 0.0) {
      gradients = at::_foreach_add(gradients, batch.parameters, decay);
    }
    if (momentum_ != 0.0) {
      at::_foreach_mul_(buffers, momentum_);
      at::_foreach_add_(buffers, gradients);
      gradients =
          nesterov_ ? at::_foreach_add(gradients, buffers, momentum_) : buffers;
    }
    at::_foreach_add_(batch.parameters, gradients, -rate);
  }

  double momentum_;
  bool nesterov_;
  std::vector<torch::Tensor> buffers_;
};

class Adam : public Optimizer {
 public:
  Adam(const OptimizerOptions& options, std::vector<ParameterGroup> groups)
      : Optimizer(std::move(groups), options.learning_rate),
        decoupled_decay_(options.name == "adamw"),
        beta1_(options.beta1),
        beta2_(options.beta2),
        epsilon_(options.epsilon) {
    const auto all = parameters();
    exp_avg_ = zeros_like_all(all);
    exp_avg_sq_ = zeros_like_all(all);
    for (const auto& parameter : all) {
      steps_.push_back(
          torch::zeros({}, parameter.options().dtype(torch::kFloat32)));
    }
  }

  NamedTensors state() const override {
    NamedTensors state;
    append_state(state, groups(), "exp_avg", exp_avg_);
    append_state(state, groups(), "exp_avg_sq", exp_avg_sq_);
    append_state(state, groups(), "step", steps_);
    return state;
  }

  std::vector<OptimizerStateKind> state_kinds() const override {
    return {
        {.name = "exp_avg"},
        {.name = "exp_avg_sq"},
        {.name = "step", .is_number = true}};
  }

 private:
  void update(const Batch& batch, double rate, double decay) override {
    const auto steps = pick(steps_, batch.indices);
    if (batch.parameters.front().is_cpu()) {
      for (const auto& step : steps) {
        *step.data_ptr<float>() += 1.0f;
      }
    } else {
      at::_foreach_add_(steps, 1);
    }
    const auto kernel = [&](auto function) {
      function(
          batch.parameters, batch.gradients, pick(exp_avg_, batch.indices),
          pick(exp_avg_sq_, batch.indices),
          /*max_exp_avg_sqs=*/std::vector<torch::Tensor>{}, steps, rate, beta1_,
          beta2_, decay, epsilon_,
          /*amsgrad=*/false,
          /*maximize=*/false);
    };
    if (decoupled_decay_) {
      kernel([](auto&&... arguments) { at::_fused_adamw_(arguments...); });
    } else {
      kernel([](auto&&... arguments) { at::_fused_adam_(arguments...); });
    }
  }

  bool decoupled_decay_;
  double beta1_;
  double beta2_;
  double epsilon_;
  std::vector<torch::Tensor> exp_avg_;
  std::vector<torch::Tensor> exp_avg_sq_;
  std::vector<torch::Tensor> steps_;  // float32 scalars: what the kernels take
};

// Throws unless low <= value < high; a NaN is outside.
void check_range(
    const char* key, double value, double low, double high, const char* rule) {
  if (!(value >= low && value < high)) {
    std::ostringstream text;
    text << "[optimizer] " << key << "=" << value << " must be " << rule;
    throw ConfigError(text.str());
  }
}

void check_options(const OptimizerOptions& options) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const char* kNotNegative = "a finite number, 0 or more";
  check_range(
      "learning_rate", options.learning_rate, 0, kInfinity, kNotNegative);
  check_range("weight_decay", options.weight_decay, 0, kInfinity, kNotNegative);
  check_range("momentum", options.momentum, 0, kInfinity, kNotNegative);
  check_range("beta1", options.beta1, 0, 1, "in [0, 1)");
  check_range("beta2", options.beta2, 0, 1, "in [0, 1)");
  check_range("epsilon", options.epsilon, 0, kInfinity, kNotNegative);
  if (options.name == "sgd" && options.nesterov && options.momentum == 0.0) {
    throw ConfigError(
        "[optimizer] nesterov=true needs momentum above 0, such as 0.9");
  }
}

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(
    const OptimizerOptions& options, std::vector<ParameterGroup> groups) {
  check_options(options);
  if (options.name == "sgd") {
    return std::make_unique<Sgd>(options, std::move(groups));
  }
  if (options.name == "adam" || options.name == "adamw") {
    return std::make_unique<Adam>(options, std::move(groups));
  }
  throw ConfigError(
      "[optimizer] name=\"" + options.name +
      "\" is not an optimizer; choose sgd, adam or adamw");
}

std::vector<ParameterGroup>
parameter_groups(const NamedTensors& parameters, double weight_decay) {
  ParameterGroup decayed{.weight_decay = weight_decay};
  ParameterGroup plain;
  for (const auto& item : parameters) {
    const bool is_matrix = item.second.defined() && item.second.dim() > 1;
    (is_matrix ? decayed : plain).parameters.push_back(item);
  }
  return {std::move(decayed), std::move(plain)};
}

std::unique_ptr<Optimizer> make_optimizer(
    const OptimizerOptions& options, const NamedTensors& parameters) {
  return make_optimizer(
      options, parameter_groups(parameters, options.weight_decay));
}

std::unique_ptr<Optimizer> make_optimizer(
    const OptimizerOptions& options, const torch::nn::Module& module) {
  NamedTensors parameters;
  std::unordered_set<const void*> seen;
  for (const auto& item : module.named_parameters()) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) {
      parameters.emplace_back(item.key(), item.value());
    }
  }
  return make_optimizer(options, parameters);
}

}  // namespace echelon
