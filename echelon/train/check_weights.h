// Whether a weights file fits a model.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/models/parameter_list.h"

namespace echelon {

/// Throws DataError that lists what differs: names that are missing or too
/// many, shapes, dtypes; five lines at most. Floating-point tensors may be of a
/// type that the model's holds exactly (F16, BF16 and F32 in a float64 model).
/// Throws DataError also for a file that is missing or malformed.
///
///   place  how each message begins, "first.toml:3:11: [model] weights = …"
void check_weights(
    const std::string& path,
    const std::vector<ParameterInfo>& parameters,
    const std::string& place);

}  // namespace echelon
