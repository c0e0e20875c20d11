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

// The module that the last part of a dotted name belongs to, and that part.
// Modules on the way that do not exist are created; else the result is null.
std::pair<torch::nn::Module*, std::string>
find_owner(torch::nn::Module& root, const std::string& name, bool create) {
  torch::nn::Module* owner = &root;
  size_t begin = 0;
  for (size_t dot; (dot = name.find('.', begin)) != std::string::npos;
       begin = dot + 1) {
    const std::string part = name.substr(begin, dot - begin);
    const auto children = owner->named_children();
    const auto* child = children.find(part);
    if (child == nullptr && !create) return {nullptr, ""};
    owner =
        child != nullptr
            ? child->get()
            : owner
                  ->register_module(part, std::make_shared<torch::nn::Module>())
                  .get();
  }
  return {owner, name.substr(begin)};
}

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
  const auto [owner, last] = find_owner(root, name, /*create=*/true);
  owner->register_module(last, std::move(module));
}

void unlist_parameter(torch::nn::Module& root, const std::string& name) {
  const auto [owner, last] = find_owner(root, name, /*create=*/false);
  if (owner == nullptr) return;
  auto& parameters = Parameters::of(*owner);
  if (parameters.contains(last)) parameters.erase(last);
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
