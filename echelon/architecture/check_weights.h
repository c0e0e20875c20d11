// Whether a weights file, or folder, fits a model.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "echelon/architecture/parameter_list.h"
#include "echelon/architecture/weights_source.h"
#include "echelon/checkpoint/format/tensor_stream.h"

namespace echelon {

/// One line for each tensor that does not fit: missing and unknown names,
/// shapes, dtypes. A floating-point tensor may have any dtype that the model's
/// can represent exactly (F16, BF16 and F32 in a float64 model). BatchNorm's
/// num_batches_tracked may be missing: nothing depends on it, and files of old
/// PyTorch releases do not have it. So may adapters (trained_parameters.h). One
/// of several tied parameters suffices.
///
///   expected  whether the file may have a tensor that is not in `parameters`,
///             because it belongs to another slice of the model. Empty: none.
std::vector<std::string> weights_differences(
    const WeightsSource& weights, const std::vector<ParameterInfo>& parameters,
    const std::function<bool(const std::string& name)>& expected = {});

/// Throws DataError that lists the first differences, in five lines at most, or
/// says that the file is missing or malformed.
///
///   path     a safetensors file or a Hugging Face folder
///   tensors  those of the file
///   place    the beginning of the message, "first.toml:3:11: [model] weights =
///   …"
void check_weights(
    const std::string& path, const std::vector<ParameterInfo>& parameters,
    const std::string& place);
void check_weights(
    const std::vector<TensorFacts>& tensors,
    const std::vector<ParameterInfo>& parameters, const std::string& place);

}  // namespace echelon
