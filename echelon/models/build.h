// One function per model: it fills an empty network with layers.
#pragma once

#include <cstdint>
#include <vector>

#include "echelon/models/network.h"
#include "echelon/models/parameter_list.h"

namespace echelon::models {

void build_simple_cnn(
    Network& network, const std::vector<int64_t>& image, int64_t classes);

void build_mlp(
    Network& network,
    int64_t features,
    const std::vector<int64_t>& hidden,
    int64_t classes);

void build_resnet(
    Network& network,
    const ResnetPlan& plan,
    int64_t channels,
    int64_t classes);

}  // namespace echelon::models
