// Registers the modules of layers under the names of their list.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>

namespace echelon {

/// Registers `module` under a dotted name: "layer1.0" is the child "0" of the
/// child "layer1" of `root`, which is created when it does not exist.
void register_under(
    torch::nn::Module& root, const std::string& name,
    std::shared_ptr<torch::nn::Module> module);

}  // namespace echelon
