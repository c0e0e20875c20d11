// Whether a weights file fits a model.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/checkpoint/safetensors.h"
#include "echelon/models/parameter_list.h"

namespace echelon {

/// One line for each tensor that does not fit: names that are missing or too
/// many, shapes, dtypes. Floating-point tensors may be of a type that the
/// model's holds exactly (F16, BF16 and F32 in a float64 model). BatchNorm's
/// num_batches_tracked may be missing: nothing depends on it, and files of old
/// PyTorch releases do not have it.
std::vector<std::string> weights_differences(
    const safetensors::File& file,
    const std::vector<ParameterInfo>& parameters);

/// Throws DataError that lists the first of them, five lines at most, or that
/// the file is missing or malformed.
///
///   place  how each message begins, "first.toml:3:11: [model] weights = …"
void check_weights(
    const std::string& path,
    const std::vector<ParameterInfo>& parameters,
    const std::string& place);

}  // namespace echelon
