#include "echelon/layers/registration.h"

#include <torch/csrc/autograd/variable.h>

#include <set>
#include <utility>
#include <vector>

namespace echelon {
namespace {

// torch::nn::Module lets only derived classes erase a parameter.
struct Parameters : torch::nn::Module {
  static torch::OrderedDict<std::string, torch::Tensor>&
  of(torch::nn::Module& module) {
    return module.*(&Parameters::parameters_);
  }
};

bool same_memory(const torch::Tensor& a, const torch::Tensor& b) {
  return a.is_alias_of(b) && a.storage_offset() == b.storage_offset() &&
         a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         a.strides() == b.strides();
}

struct Seen {
  std::set<const torch::nn::Module*> modules;
  std::set<const c10::TensorImpl*> parameters;
};

void unlist_seen(torch::nn::Module& module, Seen& seen) {
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    if (!seen.parameters.insert(item.value().unsafeGetTensorImpl()).second) {
      Parameters::of(module).erase(item.key());
    }
  }
  for (const auto& child : module.named_children()) {
    if (seen.modules.insert(child.value().get()).second) {
      unlist_seen(*child.value(), seen);
    } else {
      module.unregister_module(child.key());
    }
  }
}

}  // namespace

void register_under(
    torch::nn::Module& root, const std::string& name,
    std::shared_ptr<torch::nn::Module> module) {
  torch::nn::Module* owner = &root;
  size_t begin = 0;
  for (size_t dot; (dot = name.find('.', begin)) != std::string::npos;
       begin = dot + 1) {
    const std::string part = name.substr(begin, dot - begin);
    const auto children = owner->named_children();
    const auto* child = children.find(part);
    auto next = child != nullptr
                    ? *child
                    : owner->register_module(
                          part, std::make_shared<torch::nn::Module>());
    owner = next.get();
  }
  owner->register_module(name.substr(begin), std::move(module));
}

void unlist_parameter(torch::nn::Module& root, const std::string& name) {
  torch::nn::Module* owner = &root;
  size_t begin = 0;
  for (size_t dot; (dot = name.find('.', begin)) != std::string::npos;
       begin = dot + 1) {
    const auto children = owner->named_children();
    const auto* child = children.find(name.substr(begin, dot - begin));
    if (child == nullptr) return;
    owner = child->get();
  }
  auto& parameters = Parameters::of(*owner);
  if (parameters.contains(name.substr(begin))) {
    parameters.erase(name.substr(begin));
  }
}

void list_each_parameter_once(torch::nn::Module& root) {
  Seen seen;
  unlist_seen(root, seen);
}

SharedParameter::SharedParameter(
    torch::Tensor parameter, torch::Tensor use,
    std::optional<torch::Device> device)
    : parameter_(std::move(parameter)), use_(std::move(use)), device_(device) {
  use_.set_requires_grad(false);
  refresh();
}

void SharedParameter::refresh() const {
  const auto values = device_ ? moved(parameter_, *device_) : parameter_;
  if (!same_memory(use_, values)) use_.set_data(values.detach());
  auto edge = torch::autograd::impl::gradient_edge(values);
  if (use_.grad_fn() != edge.function) {
    torch::autograd::impl::set_gradient_edge(use_, std::move(edge));
  }
}

torch::Tensor moved(const torch::Tensor& tensor, torch::Device device) {
  return tensor.to(
      device, tensor.scalar_type(), /*non_blocking=*/!device.is_cpu());
}

}  // namespace echelon
