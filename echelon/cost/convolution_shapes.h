// What the layers of the convolutional networks cost, from formulas: those that
// echelon trains, layer by layer under the same names.
// Sources: He et al., 2015, arXiv:1512.03385, table 1; the counting of
// echelon's own layers (models/layer_cost.h), which a test compares with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/cost/model_shape.h"

namespace echelon {

struct ImageShape {
  int64_t channels = 3;
  int64_t height = 224;
  int64_t width = 224;
  bool operator==(const ImageShape&) const = default;
};

/// resnet18, resnet34, resnet50, resnet101, resnet152, simple_cnn.
const std::vector<std::string>& convolution_names();

/// `name` is one of convolution_names(). Throws ConfigError for images that are
/// too small for the network.
ModelShape convolution_shape(
    const std::string& name, const ImageShape& image, int64_t classes);

}  // namespace echelon
