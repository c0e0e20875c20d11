// What the simulator says of the run that this process trained, on this machine.
#pragma once

#include "echelon/comm/world.h"
#include "echelon/timeline/prediction_section.h"
#include "echelon/train/job.h"
#include "echelon/train/model_source.h"

namespace echelon {

/// Formulas stand for the models that they know on a GPU, and where ranks compute each
/// layer together; else the layers are counted (counted_shape.h), a program's own too.
/// One rank alone may call it. Throws nothing for what cannot be predicted: why is in
/// the result. `own_layers`: the model is a program's, not the configuration's.
StepPrediction predict_step_here(
    const Job& job, const ModelSource& source, const World& world, bool own_layers);

}  // namespace echelon
