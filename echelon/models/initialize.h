// First values of a module from the list of its parameters.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "echelon/architecture/parameter_list.h"
#include "echelon/layers/parameter_init.h"

namespace echelon {

/// Gives every parameter and buffer of `module`, a layer or a whole model, its
/// first value; where only a shard of one is here (sharded_module.h), that of
/// the shard. Throws Error when the module's names or whole shapes are not
/// those of `list`.
///
///   prefix  what `list` has before the module's own names: "layer1.0."
void initialize(
    torch::nn::Module& module, std::string_view prefix,
    const std::vector<ParameterInfo>& list, uint64_t seed);

}  // namespace echelon
