// The output of `echelon plan`.
#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "echelon/cli/terminal.h"
#include "echelon/planner/plan.h"

namespace echelon::cli {

void print_plan_text(
    const PlanRequest& request, const PlanResult& result, const Style& style,
    std::ostream& out);
void print_plan_json(
    const PlanRequest& request, const PlanResult& result, std::ostream& out);

void print_alternatives_text(
    const PlanRequest& request, const std::string& key,
    const std::vector<Alternative>& rows, const Style& style,
    std::ostream& out);
void print_alternatives_json(
    const PlanRequest& request, const std::string& key,
    const std::vector<Alternative>& rows, std::ostream& out);

}  // namespace echelon::cli
