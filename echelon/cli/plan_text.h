// What `echelon plan` prints.
#pragma once

#include <string>
#include <vector>

#include "echelon/planner/plan.h"

namespace echelon::cli {

/// The plans as tables and paragraphs as wide as the terminal; with `verbose`
/// the step, the memory and the configuration of the best one. When nothing
/// fits: the closest plan and what would do.
void print_plan_text(
    const planner::PlanRequest& request, const planner::PlanResult& result,
    bool verbose);
/// The same, complete, for programs.
void print_plan_json(
    const planner::PlanRequest& request, const planner::PlanResult& result);

/// The best plan with each value of `key`, or why there is none.
void print_alternatives_text(
    const planner::PlanRequest& request, const std::string& key,
    const std::vector<planner::Alternative>& rows);
void print_alternatives_json(
    const planner::PlanRequest& request, const std::string& key,
    const std::vector<planner::Alternative>& rows);

/// The best plan for each number of devices, a line each: how fast a job is on
/// it, and with which layout.
void print_sizes_text(
    const planner::PlanRequest& request,
    const std::vector<planner::Alternative>& rows);

}  // namespace echelon::cli
