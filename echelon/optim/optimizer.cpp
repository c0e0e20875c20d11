// step() collects the parameters that have a gradient into batches of one
// device and dtype, and a fused kernel updates each batch by one call: our own,
// or LibTorch's.
// State is kept by the parameter's number in the order of the groups, and made
// at the start, so a checkpoint has all of it after any step.
#include "echelon/optim/optimizer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numbers>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

#include "echelon/comm/nccl/accelerator.h"
#include "echelon/error.h"
#include "echelon/kernels/update.h"
#include "echelon/optim/clip.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon {
namespace {

std::string place(const std::string& name) {
  return "the optimizer's parameter \"" + name + "\"";
}

// The fused kernels walk over raw memory, so a parameter, its gradient and its
// state must have the same dtype and order of elements.
void check_parameter(const std::string& name, const torch::Tensor& parameter) {
  if (!parameter.defined() || !parameter.is_floating_point() ||
      !parameter.is_non_overlapping_and_dense()) {
    throw ConfigError(
        place(name) +
        " must be a floating-point tensor that fills its memory; pass "
        "parameters, not strided views of them");
  }
  if (!parameter.is_leaf()) {
    throw ConfigError(
        place(name) +
        " is the result of a computation; pass the leaf that it is computed "
        "from");
  }
}

void check_groups(const std::vector<ParameterGroup>& groups) {
  std::unordered_set<std::string> names;
  std::unordered_map<const void*, std::string> tensors;
  for (const auto& group : groups) {
    for (const auto& [name, parameter] : group.parameters) {
      check_parameter(name, parameter);
      if (!names.insert(name).second) {
        throw ConfigError(place(name) + " is listed twice; list it once");
      }
      const auto [other, is_new] =
          tensors.emplace(parameter.unsafeGetTensorImpl(), name);
      if (!is_new) {
        throw ConfigError(format(
            "{} is the same tensor as \"{}\"; list it once", place(name),
            other->second));
      }
    }
  }
}

torch::Tensor
matching_gradient(const std::string& name, const torch::Tensor& parameter) {
  const auto& gradient = parameter.grad();
  if (gradient.is_sparse()) {
    throw ConfigError(
        place(name) +
        " has a sparse gradient; make it dense (embedding with sparse=false)");
  }
  if (gradient.scalar_type() == parameter.scalar_type() &&
      gradient.strides() == parameter.strides()) {
    return gradient;
  }
  return torch::empty_like(parameter).copy_(gradient);
}

}  // namespace

Optimizer::Optimizer(std::vector<ParameterGroup> groups, double learning_rate)
    : groups_(std::move(groups)), learning_rate_(learning_rate) {
  check_groups(groups_);
}

void Optimizer::set_learning_rate(double rate) {
  learning_rate_ = rate;
  for (auto& [factor, tensor] : rates_) tensor.fill_(rate * factor);
}

// A graph's rates are made by a step before it is captured.
Optimizer::Rate Optimizer::rate_of(const Batch& batch, double factor) {
  const double rate = learning_rate_ * factor;
  const auto& like = batch.parameters.front();
  if (like.is_cpu()) return rate;
  auto& there = rates_[factor];
  if (!there.defined()) {
    there = torch::full(
        {}, rate, torch::dtype(torch::kFloat32).device(like.device()));
  }
  if (is_capturing(like.device())) return there;
  if (like.scalar_type() == torch::kFloat64) return rate;
  return static_cast<double>(static_cast<float>(rate));
}

void Optimizer::step(const torch::Tensor& skip, const torch::Tensor& factor) {
  const torch::NoGradGuard no_grad;
  // A CPU's flag is known, and saves the update.
  if (skip.defined() && skip.is_cpu() && skip.item<float>() != 0) return;
  const bool asks = skip.defined() && !skip.is_cpu();
  // A CPU's factor is known, and 1 saves a pass over the gradients.
  const bool scales =
      factor.defined() && !(factor.is_cpu() && factor.item<double>() == 1);
  size_t index = 0;
  for (const auto& group : groups_) {
    std::map<detail::TensorKind, Batch> batches;
    for (const auto& [name, parameter] : group.parameters) {
      if (parameter.grad().defined()) {
        auto& batch = batches[detail::kind_of(parameter)];
        batch.parameters.push_back(parameter);
        batch.gradients.push_back(matching_gradient(name, parameter));
        batch.indices.push_back(index);
      }
      ++index;
    }
    for (const auto& [key, batch] : batches) {
      const auto& first = batch.parameters.front();
      const auto here = [&](const torch::Tensor& number) {
        return detail::moved(number, first.device(), torch::kFloat32);
      };
      How how{
          .learning_rate = rate_of(batch, group.learning_rate_factor),
          .weight_decay = group.weight_decay,
          .by_our_kernels = kernels::takes_update(first)};
      if (asks) how.skip = here(skip);
      if (scales && how.by_our_kernels) how.factor = here(factor);
      if (scales && !how.by_our_kernels) {
        detail::multiply(batch.gradients, factor);
      }
      update(batch, how);
    }
  }
}

void Optimizer::zero_grad(ZeroGrad how) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : parameters()) {
    auto& gradient = parameter.mutable_grad();
    if (!gradient.defined()) continue;
    if (how == ZeroGrad::set_to_none) {
      gradient.reset();
    } else {
      gradient.zero_();
    }
  }
}

std::vector<torch::Tensor> Optimizer::parameters() const {
  std::vector<torch::Tensor> all;
  for (const auto& group : groups_) {
    for (const auto& [name, parameter] : group.parameters) {
      all.push_back(parameter);
    }
  }
  return all;
}

void Optimizer::load_state(const NamedTensors& values) {
  const torch::NoGradGuard no_grad;
  const NamedTensors own = state();
  std::map<std::string, torch::Tensor> given(values.begin(), values.end());
  std::ostringstream problems;
  for (const auto& [name, tensor] : own) {
    const auto found = given.find(name);
    if (found == given.end()) {
      problems << "\n  " << name << ": missing";
    } else if (found->second.sizes() != tensor.sizes()) {
      problems << "\n  " << name << ": shape " << found->second.sizes()
               << ", here " << tensor.sizes();
    }
  }
  const std::map<std::string, torch::Tensor> known(own.begin(), own.end());
  for (const auto& [name, tensor] : given) {
    if (!known.contains(name)) {
      problems << "\n  " << name << ": not part of this optimizer";
    }
  }
  if (const std::string text = problems.str(); !text.empty()) {
    throw CheckpointError(
        "the optimizer's state does not fit; use the model and optimizer that "
        "it was saved from:" +
        text);
  }
  for (const auto& [name, tensor] : own) tensor.copy_(given.at(name));
}

namespace {

// Returns zeros for each parameter, in its memory order.
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
  for (size_t index : indices) picked.push_back(all[index]);
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

kernels::UpdateStep update_step(
    const std::variant<double, torch::Tensor>& rate,
    const std::optional<torch::Tensor>& factor,
    const std::optional<torch::Tensor>& skip) {
  kernels::UpdateStep step{.factor = factor, .skip = skip};
  if (const auto* number = std::get_if<double>(&rate)) {
    step.rate = *number;
  } else {
    step.rate_on_device = std::get<torch::Tensor>(rate);
  }
  return step;
}

class Sgd : public Optimizer {
 public:
  Sgd(const OptimizerOptions& options, std::vector<ParameterGroup> groups)
      : Optimizer(std::move(groups), options.learning_rate),
        momentum_(options.momentum),
        nesterov_(options.nesterov) {
    if (momentum_ != 0.0) buffers_ = zeros_like_all(parameters());
  }

  NamedTensors state() const override {
    NamedTensors state;
    if (momentum_ != 0.0) append_state(state, groups(), "momentum", buffers_);
    return state;
  }

  std::vector<OptimizerStateKind> state_kinds() const override {
    if (momentum_ == 0.0) return {};
    return {{.name = "momentum"}};
  }

 private:
  void update(const Batch& batch, const How& how) override {
    // A buffer that starts at zero makes the first step like any other:
    // momentum * 0 + g.
    const auto buffers = momentum_ == 0.0 ? std::vector<torch::Tensor>{}
                                          : pick(buffers_, batch.indices);
    const double decay = how.weight_decay;
    if (how.by_our_kernels) {
      return kernels::update_by_sgd(
          {batch.parameters, batch.gradients}, buffers,
          update_step(how.learning_rate, how.factor, how.skip),
          {.momentum = momentum_,
           .weight_decay = decay,
           .nesterov = nesterov_});
    }
    const auto& first = batch.parameters.front();
    if (first.is_cpu() && at::isReducedFloatingType(first.scalar_type())) {
      return update_unfused(
          batch, buffers, std::get<double>(how.learning_rate), decay);
    }
    std::visit(
        [&](const auto& number) {
          at::_fused_sgd_(
              batch.parameters, batch.gradients, buffers, decay, momentum_,
              number, /*dampening=*/0.0, nesterov_, /*maximize=*/false,
              /*is_first_step=*/false, /*grad_scale=*/std::nullopt, how.skip);
        },
        how.learning_rate);
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
        decoupled_decay_(options.name == OptimizerKind::adamw),
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
  void update(const Batch& batch, const How& how) override {
    const auto steps = pick(steps_, batch.indices);
    if (batch.parameters.front().is_cpu()) {
      for (const auto& step : steps) *step.data_ptr<float>() += 1.0f;
    } else {
      at::_foreach_add_(steps, 1);
      if (how.skip) {
        at::_foreach_sub_(steps, std::vector(steps.size(), *how.skip));
      }
    }
    const auto means = pick(exp_avg_, batch.indices);
    const auto squares = pick(exp_avg_sq_, batch.indices);
    if (how.by_our_kernels) {
      return kernels::update_by_adam(
          {batch.parameters, batch.gradients}, means, squares, steps,
          update_step(how.learning_rate, how.factor, how.skip),
          {.beta1 = beta1_,
           .beta2 = beta2_,
           .epsilon = epsilon_,
           .weight_decay = how.weight_decay,
           .decoupled = decoupled_decay_});
    }
    const auto kernel = [&](auto function) {
      std::visit(
          [&](const auto& number) {
            function(
                batch.parameters, batch.gradients, means, squares,
                /*max_exp_avg_sqs=*/std::vector<torch::Tensor>{}, steps, number,
                beta1_, beta2_, how.weight_decay, epsilon_, /*amsgrad=*/false,
                /*maximize=*/false, /*grad_scale=*/std::nullopt, how.skip);
          },
          how.learning_rate);
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
    throw ConfigError(
        format("[optimizer] {}={:g} must be {}", key, value, rule));
  }
}

void check_options(const OptimizerOptions& options) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const char* kNotNegative = "a finite number, 0 or more";
  check_range(
      "learning_rate", options.learning_rate, 0, kInfinity, kNotNegative);
  check_range("weight_decay", options.decay(), 0, kInfinity, kNotNegative);
  check_range("momentum", options.momentum, 0, kInfinity, kNotNegative);
  check_range("beta1", options.beta1, 0, 1, "in [0, 1)");
  check_range("beta2", options.beta2, 0, 1, "in [0, 1)");
  check_range("epsilon", options.epsilon, 0, kInfinity, kNotNegative);
  if (options.name == OptimizerKind::sgd && options.nesterov &&
      options.momentum == 0.0) {
    throw ConfigError(
        "[optimizer] nesterov=true needs momentum above 0, such as 0.9");
  }
}

void check_factor(const char* key, double value) {
  if (!std::isfinite(value) || value < 0.0) {
    throw ConfigError(format(
        "[optimizer] {}={:f}: a learning rate is multiplied by it, so it must "
        "be 0 or more",
        key, value));
  }
}

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(
    const OptimizerOptions& options, std::vector<ParameterGroup> groups) {
  check_options(options);
  if (options.name == OptimizerKind::sgd) {
    return std::make_unique<Sgd>(options, std::move(groups));
  }
  return std::make_unique<Adam>(options, std::move(groups));
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
  return make_optimizer(options, parameter_groups(parameters, options.decay()));
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

LearningRateSchedule::LearningRateSchedule(
    const OptimizerOptions& options, int64_t total_steps)
    : options_(options), total_steps_(std::max<int64_t>(total_steps, 1)) {
  const int64_t warmup = options.warmup_steps;
  if (warmup < 0 || (warmup > 0 && warmup >= total_steps_)) {
    throw ConfigError(format(
        "[optimizer] warmup_steps={} must be 0 or more and less than the run's "
        "{}",
        warmup, counted(total_steps_, "step")));
  }
  check_factor("final_factor", options.final_factor);
  check_factor("step_factor", options.step_factor);
  if (options.schedule == RateSchedule::step && options.step_every < 1) {
    throw ConfigError(format(
        "[optimizer] schedule=\"step\" needs step_every, the steps between two "
        "drops, 1 or more; it is {}",
        options.step_every));
  }
}

double LearningRateSchedule::factor(int64_t step) const {
  step = std::clamp<int64_t>(step, 0, total_steps_);
  const int64_t warmup = options_.warmup_steps;
  if (step < warmup) {
    return static_cast<double>(step + 1) / static_cast<double>(warmup + 1);
  }
  const int64_t after = step - warmup;
  const double last = options_.final_factor;
  const double progress =
      static_cast<double>(after) / static_cast<double>(total_steps_ - warmup);
  switch (options_.schedule) {
    case RateSchedule::constant:
      return 1.0;
    case RateSchedule::linear:
      return 1.0 + (last - 1.0) * progress;
    case RateSchedule::cosine:
      return last +
             (1.0 - last) * 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
    case RateSchedule::step:
      return std::pow(
          options_.step_factor,
          static_cast<double>(after / options_.step_every));
  }
  return 1.0;
}

}  // namespace echelon
