// The report's section on where the time of the recorded steps went: one
// sentence, pictures of typical steps, a table of the ranks.
#pragma once

#include <string>

#include "echelon/report/markup.h"
#include "echelon/timeline/overlap.h"

namespace echelon {

/// `diagnosis` is that of `timeline`. Nothing when no step was recorded.
void draw_time_section(
    Markup& page, const Timeline& timeline, const Diagnosis& diagnosis);

/// The lanes of one typical step alone, with their legend; `prefix` makes its
/// id unique.
void draw_typical_step(
    Markup& page, const Timeline& timeline, const Diagnosis& diagnosis,
    const std::string& prefix);

}  // namespace echelon
