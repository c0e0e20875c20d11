// What `echelon plan` prints.
#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "echelon/planner/plan.h"

namespace echelon::cli {

struct PlanStyle {
  bool colours = false;
  size_t columns = 100;
};

void print_plan_text(
    const PlanRequest& request, const PlanResult& result,
    const PlanStyle& style, std::ostream& out);
void print_plan_json(
    const PlanRequest& request, const PlanResult& result, std::ostream& out);

void print_alternatives_text(
    const PlanRequest& request, const std::string& key,
    const std::vector<Alternative>& rows, const PlanStyle& style,
    std::ostream& out);
void print_alternatives_json(
    const PlanRequest& request, const std::string& key,
    const std::vector<Alternative>& rows, std::ostream& out);

}  // namespace echelon::cli
