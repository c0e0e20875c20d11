// The report's pictures of tensor-parallel layers: each matrix with the shard
// of every rank, and the collectives where they run.
#pragma once

#include "echelon/report/markup.h"
#include "echelon/report/tensor_shards.h"
#include "echelon/timeline/overlap.h"
#include "echelon/timeline/timeline.h"

namespace echelon {

/// Nothing for a model that is not sharded. The times of the collectives are
/// those of the timeline's calls on the axis "tp", whose labels begin with the
/// full name of the matrix, or of the part of the layer, that they serve.
void draw_tensor_section(
    Markup& page, const TensorShards& model, const Timeline& timeline,
    const Diagnosis& diagnosis);

}  // namespace echelon
