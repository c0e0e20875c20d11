// Stacked bars of a plan's page: what memory is for, what time goes to.
#pragma once

#include "echelon/planner/plan.h"
#include "echelon/report/markup.h"

namespace echelon {

/// The best plan's pipeline ranks (when nothing fits: the closest one's), then
/// the fullest device of the other plans, of the textbook choices and of the
/// smallest cluster that would do, each against what a job may use.
void draw_memory_bars(
    Markup& page, const PlanRequest& request, const PlanResult& result);

/// The best plans' steps, by what they are spent on.
void draw_part_bars(
    Markup& page, const PlanRequest& request, const PlanResult& result);

}  // namespace echelon
