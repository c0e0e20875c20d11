// The report's pictures of layers that are cut in pieces: each matrix with
// every rank's part, and the collectives where they run.
#pragma once

#include "echelon/report/markup.h"
#include "echelon/report/tensor_cut.h"
#include "echelon/timeline/overlap.h"
#include "echelon/timeline/timeline.h"

namespace echelon {

/// Nothing for a model that is not cut. What the collectives took is read from
/// the timeline's calls on the axis "tp", whose labels begin with the full name
/// of the matrix, or of the part of the layer, that they serve.
void draw_tensor_section(
    Markup& page, const TensorCut& cut, const Timeline& timeline,
    const Diagnosis& diagnosis);

}  // namespace echelon
