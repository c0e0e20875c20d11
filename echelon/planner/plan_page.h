// A plan as a page: one file under 500 KB, without network.
#pragma once

#include <string>
#include <vector>

#include "echelon/planner/plan.h"

namespace echelon::planner {

struct PlanPage {
  PlanRequest request;
  PlanResult result;  // with a plan, or the closest to one
  std::vector<Plan>
      choices;  // for the scatter plot, of several numbers of devices
  std::vector<Plan> growth;  // the best of each number of devices, ascending
};

/// Searches what the page shows besides the plan: the layouts on a quarter,
/// half and twice the devices (where nothing fits: of the smallest cluster that
/// would do), and the best on 8 to 16,384 devices.
PlanPage make_plan_page(const PlanRequest& request, const PlanResult& result);

std::string to_html(const PlanPage& page);

}  // namespace echelon::planner
