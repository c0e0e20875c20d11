// The cost of the convolutional networks that echelon trains, by formula, layer
// by layer under the same names.
// Sources: He et al., 2015, arXiv:1512.03385, table 1; a test compares with the
// counts of echelon's own layers (counting/layer_cost.h).
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
/// too small.
ModelShape convolution_shape(
    const std::string& name, const ImageShape& image, int64_t classes);

}  // namespace echelon
