// A run's layers as its trainer counted them, in a file of the run's folder:
// who predicts the run later predicts what its report did.
#pragma once

#include <filesystem>
#include <optional>

#include "echelon/cost/model_shape.h"
#include "echelon/job/job.h"
#include "echelon/predict/configured.h"

namespace echelon {

/// In the run's folder, as `echelon-train count CONFIG --json` prints it.
inline constexpr const char* kCountedLayersFile = "layers.json";

/// Whether a run's layers are counted: those of a processor, and a program's
/// own anywhere. Formulas stand for the others, which are of fused kernels, and
/// where ranks compute a layer together: what they send within it is not
/// counted.
bool counts_layers(const Layout& layout, bool on_processor, bool own_layers);

/// FOLDER/layers.json; empty when there is none. Throws DataError when it is
/// broken.
std::optional<ModelShape>
read_counted_layers(const std::filesystem::path& folder);

/// What `job` asks for, of layers that were counted for `counted_for`, which
/// differs from it in settings alone. With another number of stages the layers
/// are cut anew, by what they take. Throws ConfigError for settings with which
/// layers are others: [model], [precision], ranks that compute a layer
/// together.
Configured configured_as_counted(
    const ModelShape& layers, const Job& counted_for, const Job& job);

}  // namespace echelon
