// What each rank held over one step, by kind: stacked areas, with the plan's
// peak and the limit as lines.
#pragma once

#include "echelon/report/markup.h"
#include "echelon/timeline/overlap.h"
#include "echelon/timeline/timeline.h"

namespace echelon {

/// A typical step of at most kMemoryPictures ranks, those with the largest
/// peaks. Nothing when no rank was measured.
inline constexpr size_t kMemoryPictures = 4;
void draw_memory_section(
    Markup& page, const Timeline& timeline, const Diagnosis& diagnosis);

}  // namespace echelon
