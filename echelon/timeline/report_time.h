// The report's section on where the time of the recorded steps went: one
// sentence, pictures of typical steps, a table of the ranks.
#pragma once

#include "echelon/timeline/markup.h"
#include "echelon/timeline/overlap.h"

namespace echelon {

/// `diagnosis` is that of `timeline`. Nothing when no step was recorded.
void draw_time_section(
    Markup& page, const Timeline& timeline, const Diagnosis& diagnosis);

}  // namespace echelon
