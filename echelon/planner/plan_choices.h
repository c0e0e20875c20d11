// What else there is, as pictures of a plan's page: other layouts, other
// numbers of devices.
#pragma once

#include "echelon/planner/plan_page.h"
#include "echelon/report/markup.h"

namespace echelon::planner {

/// Time against memory against devices, a point for each layout; and the same
/// as a table. Nothing without choices.
void draw_choices(report::Markup& page, const PlanPage& input);

/// How the time of a step changes with the number of devices. Nothing when none
/// of them does.
void draw_growth(report::Markup& page, const PlanPage& input);

}  // namespace echelon::planner
