// What the simulator says of the run that this process trained, on this
// machine.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "echelon/comm/world.h"
#include "echelon/cost/model_shape.h"
#include "echelon/job/job.h"
#include "echelon/report/prediction_section.h"
#include "echelon/train/strategies/model_source.h"

namespace echelon {

/// What a run's prediction takes its layers from.
struct RunLayers {
  std::optional<ModelShape> counted;  // empty: formulas stand for them
  std::string missing;                // why neither can; else empty
};

/// Counts them (counted_shape.h) where counts_layers (explain/counted_layers.h)
/// says so. One rank alone may call it. Throws nothing: why is in the result.
/// `own_layers`: the model is a program's, not the configuration's.
RunLayers layers_of_run(
    const Job& job, const ModelSource& source, const World& world,
    bool own_layers);

/// Writes those that were counted into the run's folder, for `echelon explain`;
/// an earlier life's are removed where they were not. A file that cannot be
/// written costs a warning, not the run.
void save_layers(const RunLayers& layers, const std::filesystem::path& folder);

/// One rank alone may call it. Throws nothing for what cannot be predicted: why
/// is in the result.
StepPrediction predict_step_here(
    const Job& job, const ModelSource& source, const World& world,
    const RunLayers& layers);

}  // namespace echelon
