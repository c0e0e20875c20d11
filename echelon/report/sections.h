// The sections of a run's report. Each draws nothing when the run has nothing
// to say about it; `diagnosis` is that of `timeline`.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "echelon/report/markup.h"
#include "echelon/report/tensor_shards.h"
#include "echelon/timeline/metrics.h"
#include "echelon/timeline/overlap.h"
#include "echelon/timeline/timeline.h"

namespace echelon::report {

/// Where the time of the recorded steps went: one sentence, pictures of typical
/// steps, a table of the ranks.
void draw_time_section(
    Markup& page, const timeline::Timeline& timeline,
    const timeline::Diagnosis& diagnosis);

/// The lanes of one typical step alone, with their legend; `prefix` makes its
/// id unique.
void draw_typical_step(
    Markup& page, const timeline::Timeline& timeline,
    const timeline::Diagnosis& diagnosis, const std::string& prefix);

/// A table of the ranks: where the time of a mean step went, with bars.
void draw_rank_times(
    Markup& page, const timeline::Timeline& timeline,
    const timeline::Diagnosis& diagnosis);

/// What each rank held over a typical step, by kind: stacked areas, with the
/// plan's peak and the limit as lines. At most kMemoryPictures ranks, those
/// with the largest peaks.
inline constexpr size_t kMemoryPictures = 4;
void draw_memory_section(
    Markup& page, const timeline::Timeline& timeline,
    const timeline::Diagnosis& diagnosis);

/// How the routers of a model with experts spread tokens over steps, and what
/// was dropped: curves, and the load of each expert of the kExpertPictures
/// layers whose load was the least even in the end.
inline constexpr size_t kExpertPictures = 4;
void draw_expert_section(
    Markup& page, const std::vector<timeline::StepMetrics>& metrics);

/// Pictures of tensor-parallel layers: each matrix with the shard of every
/// rank, and the collectives where they run. Nothing for a model that is not
/// sharded. The times of the collectives are those of the timeline's calls on
/// the axis "tp", whose labels begin with the full name of the matrix, or of
/// the part of the layer, that they serve.
void draw_tensor_section(
    Markup& page, const TensorShards& model, const timeline::Timeline& timeline,
    const timeline::Diagnosis& diagnosis);

}  // namespace echelon::report
