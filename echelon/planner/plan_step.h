// The step of a plan as a picture: simulated, as a real run's report draws it.
#pragma once

#include "echelon/planner/plan.h"
#include "echelon/report/markup.h"

namespace echelon {

/// Rows of microbatches for one pipeline; else what one rank computes and
/// sends; and what the others do, in words.
void draw_step(Markup& page, const PlanRequest& request, const Plan& plan);

}  // namespace echelon
