#include "echelon/models/network.h"

#include <utility>

#include "echelon/error.h"
#include "echelon/models/build.h"
#include "echelon/models/initialize.h"
#include "echelon/models/parameter_list.h"

namespace echelon {
namespace {

bool is_finite(const torch::Tensor& tensor) {
  return !tensor.is_floating_point() || tensor.numel() == 0 ||
         at::isfinite(tensor).all().item<bool>();
}

// This rank's statistics alone, whoever would take them over ranks: copies of
// the running ones also hide the call from convert_sync_batch_norm, which knows
// a module by them.
torch::Tensor
batch_norm_alone(torch::nn::BatchNorm2dImpl& module, const torch::Tensor& x) {
  const auto copy = [](const torch::Tensor& tensor) {
    return tensor.defined() ? tensor.clone() : tensor;
  };
  return at::batch_norm(
      x,
      module.weight,
      module.bias,
      copy(module.running_mean),
      copy(module.running_var),
      module.is_training() || !module.running_mean.defined(),
      module.options.momentum().value_or(0.1),
      module.options.eps(),
      /*cudnn_enabled=*/false);
}

// Batch statistics of this rank alone while it lives; buffers as they were and
// the network's own function when it is gone.
class Diagnosis {
 public:
  Diagnosis(Network& network, BatchNormFunction& function)
      : buffers_(network.buffers()), function_(function) {
    for (const auto& buffer : buffers_) {
      values_.push_back(buffer.clone());
    }
    saved_ = std::exchange(function_, batch_norm_alone);
  }
  ~Diagnosis() {
    function_ = std::move(saved_);
    for (size_t i = 0; i < buffers_.size(); ++i) {
      buffers_[i].copy_(values_[i]);
    }
  }
  Diagnosis(const Diagnosis&) = delete;
  Diagnosis& operator=(const Diagnosis&) = delete;

 private:
  torch::NoGradGuard no_grad_;
  std::vector<torch::Tensor> buffers_;
  std::vector<torch::Tensor> values_;
  BatchNormFunction& function_;
  BatchNormFunction saved_;
};

// Module::to would turn the counters of batches into floating point as well.
void to_float64(torch::nn::Module& module) {
  auto convert = [](const auto& tensors) {
    for (auto tensor : tensors) {
      if (tensor.is_floating_point()) {
        tensor.set_data(tensor.detach().to(torch::kFloat64));
      }
    }
  };
  convert(module.parameters());
  convert(module.buffers());
}

std::shared_ptr<Network> build(
    const ModelOptions& options,
    const std::vector<int64_t>& shape,
    int64_t classes) {
  auto network =
      std::make_shared<Network>([=] { return build(options, shape, classes); });
  if (options.name == "simple_cnn") {
    models::build_simple_cnn(*network, shape, classes);
  } else if (options.name == "mlp") {
    models::build_mlp(
        *network, c10::multiply_integers(shape), options.hidden, classes);
  } else {
    models::build_resnet(
        *network, resnet_plan(options.name), shape[0], classes);
  }
  if (options.dtype == "float64") {
    to_float64(*network);
  }
  return network;
}

}  // namespace

Network::Network(std::function<std::shared_ptr<Network>()> clone_function)
    : torch::nn::Module("Network"),
      clone_function_(std::move(clone_function)) {}

void Network::append(
    std::string name,
    std::function<torch::Tensor(const torch::Tensor&)> forward) {
  for (const auto& layer : layers_) {
    if (layer.name == name) {
      throw Error("the network has a layer \"" + name + "\" already");
    }
  }
  layers_.push_back({std::move(name), std::move(forward)});
}

torch::Tensor Network::forward(torch::Tensor x) {
  for (const auto& layer : layers_) {
    x = layer.forward(x);
  }
  return x;
}

void Network::set_batch_norm(BatchNormFunction function) {
  batch_norm_ = std::move(function);
}

torch::Tensor Network::batch_norm(
    torch::nn::BatchNorm2dImpl& module, const torch::Tensor& x) const {
  return batch_norm_ ? batch_norm_(module, x) : module.forward(x);
}

std::optional<NonFinite>
Network::first_nonfinite_layer(const torch::Tensor& x) {
  const Diagnosis guard(*this, batch_norm_);
  if (!is_finite(x)) {
    return NonFinite{"input", "input"};
  }
  const auto parameters = named_parameters();
  torch::Tensor y = x;
  for (const auto& layer : layers_) {
    const std::string prefix = layer.name + ".";
    for (const auto& parameter : parameters) {
      if (parameter.key().starts_with(prefix) &&
          !is_finite(parameter.value())) {
        return NonFinite{layer.name, "parameter " + parameter.key()};
      }
    }
    y = layer.forward(y);
    if (!is_finite(y)) {
      return NonFinite{layer.name, "output"};
    }
  }
  return std::nullopt;
}

std::shared_ptr<torch::nn::Module>
Network::clone(const std::optional<torch::Device>& device) const {
  if (!clone_function_) {
    throw Error(
        "this network cannot be cloned: it was made without a clone_function");
  }
  const torch::NoGradGuard no_grad;
  auto copy = clone_function_();
  auto copy_tensors = [&device](const auto& from, const auto& to) {
    for (const auto& item : from) {
      const auto& source = item.value();
      auto target = to[item.key()];
      target.set_data(source.detach().to(
          source.options().device(device.value_or(source.device())),
          /*non_blocking=*/false,
          /*copy=*/true));
      target.set_requires_grad(source.requires_grad());
    }
  };
  copy_tensors(named_parameters(), copy->named_parameters());
  copy_tensors(named_buffers(), copy->named_buffers());
  copy->train(is_training());
  copy->set_batch_norm(batch_norm_);
  return copy;
}

std::shared_ptr<Network> make_network(
    const ModelOptions& options,
    const std::vector<int64_t>& input_shape,
    int64_t classes,
    uint64_t seed) {
  const auto list = list_parameters(options, input_shape, classes);
  auto network = build(options, input_shape, classes);
  initialize(*network, list, seed);
  return network;
}

}  // namespace echelon
