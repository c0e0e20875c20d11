// A plan of memory for people, and as JSON. Free of LibTorch.
#pragma once

#include <cstddef>
#include <string>

#include "echelon/memory_plan/memory_plan.h"

namespace echelon {

struct PlanTextOptions {
  bool colours = false;  // of the bars; without them they are letters
  size_t columns = 80;   // of the terminal
};

/// Peaks by kind, with a line and a bar for ranks that are alike; then a step's
/// collectives; then whether they fit memory.limit_bytes, and what would help.
std::string to_text(
    const MemoryPlan& plan, const MemoryModel& model, const Job& job,
    const PlanTextOptions& options = {});

/// One object: {"parameters": …, "ranks": [{"ranks": [0, 1], "peak_bytes": …,
/// "bytes": {"parameters": …}, "moment": …, "collectives": […]}], "advice":
/// […]}.
std::string
to_json(const MemoryPlan& plan, const MemoryModel& model, const Job& job);

}  // namespace echelon
