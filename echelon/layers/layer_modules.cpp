#include "echelon/layers/layer_modules.h"

#include <utility>

namespace echelon {

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

}  // namespace echelon
