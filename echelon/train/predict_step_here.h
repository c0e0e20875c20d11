// The simulator's prediction of the run that this process trained, on this
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

/// The layers that a run's prediction uses.
struct RunLayers {
  std::optional<ModelShape> counted;  // empty: formulas stand for them
  std::string missing;                // why there is no prediction; else empty
};

/// Counts the layers (counted_shape.h) where counts_layers
/// (predict/counted_layers.h) says so. One rank alone may call it. Throws
/// nothing: the result says why. `own_layers`: the model is a program's, not
/// the configuration's.
RunLayers layers_of_run(
    const Job& job, const ModelSource& source, const World& world,
    bool own_layers);

/// Writes counted layers into the run's folder, for `echelon explain`; without
/// any, removes those of an earlier start of the run. A file that cannot be
/// written is a warning and does not end the run.
void save_layers(const RunLayers& layers, const std::filesystem::path& folder);

/// One rank alone may call it. Throws nothing for what cannot be predicted: the
/// result says why.
StepPrediction predict_step_here(
    const Job& job, const ModelSource& source, const World& world,
    const RunLayers& layers);

}  // namespace echelon
