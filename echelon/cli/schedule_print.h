// What `echelon schedule` prints of a schedule that check() has accepted.
#pragma once

#include <iosfwd>

#include "echelon/schedule/schedule.h"

namespace echelon::cli {

struct TextStyle {
  bool colours = false;
  size_t columns = 120;  // of the terminal; wider grids go on below
};

/// Its numbers, the grid of ranks and ticks where that is small, and a line for
/// each rank: what its stages store at most, and how long it is idle.
void print_schedule_text(
    const Schedule& schedule, const TextStyle& style, std::ostream& out);

/// The same numbers, and all actions with the time at which each begins.
void print_schedule_json(const Schedule& schedule, std::ostream& out);

/// A page with the picture.
void print_schedule_html(const Schedule& schedule, std::ostream& out);

}  // namespace echelon::cli
