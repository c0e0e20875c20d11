// A run's layers as its trainer counted them, in a file of the run's folder, so
// that later predictions of the run equal its report's.
#pragma once

#include <filesystem>
#include <optional>

#include "echelon/cost/model_shape.h"
#include "echelon/job/job.h"
#include "echelon/predict/configured.h"

namespace echelon::predict {

/// In the run's folder, as `echelon-train count CONFIG --json` prints it.
inline constexpr const char* kCountedLayersFile = "layers.json";

/// Whether a run's layers are counted: on a processor, and those of a program's
/// own model anywhere. Otherwise formulas stand for them: GPUs have fused
/// kernels, and what ranks send while they compute a layer together is not
/// counted.
bool counts_layers(const Layout& layout, bool on_processor, bool own_layers);

/// FOLDER/layers.json; empty when there is none. Throws DataError when it is
/// broken.
std::optional<cost::ModelShape>
read_counted_layers(const std::filesystem::path& folder);

/// `job` with layers that were counted for `counted_for`, which differs from it
/// in settings alone. With another number of stages the layers are partitioned
/// again by their FLOPs. Throws ConfigError for settings that change the
/// layers: [model], [precision], ranks that compute a layer together.
Configured configured_as_counted(
    const cost::ModelShape& layers, const Job& counted_for, const Job& job);

}  // namespace echelon::predict
