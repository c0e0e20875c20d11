// A bar of parts in a cell of a table.
#pragma once

#include <utility>
#include <vector>

#include "echelon/report/markup.h"

namespace echelon {

/// A colour class of the report's style, and seconds.
using BarPart = std::pair<const char*, double>;

/// A cell with the parts side by side; `longest` seconds fill it. Parts that
/// nobody would see are left out.
void draw_bar_cell(
    Markup& page, const std::vector<BarPart>& parts, double longest);

}  // namespace echelon
