// What `echelon explain` prints.
#pragma once

#include <cstddef>
#include <iosfwd>

#include "echelon/explain/explain.h"

namespace echelon::cli {

struct ExplainStyle {
  bool colours = false;
  size_t columns = 80;
};

void print_explanation_text(
    const RunExplanation& run, const ExplainStyle& style, std::ostream& out);
void print_explanation_json(const RunExplanation& run, std::ostream& out);

}  // namespace echelon::cli
