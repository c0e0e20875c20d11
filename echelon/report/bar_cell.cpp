#include "echelon/report/bar_cell.h"

namespace echelon {

void draw_bar_cell(
    Markup& page, const std::vector<BarPart>& parts, double longest) {
  page.open("td", {{"class", "bar"}});
  page.open(
      "svg", {{"width", "100%"}, {"height", "12"}, {"aria-hidden", "true"}});
  double x = 0;
  for (const auto& [color, seconds] : parts) {
    const double width = longest > 0 ? 100 * seconds / longest : 0;
    if (width < 0.005) continue;
    page.empty(
        "rect", {{"class", color},
                 {"x", coordinate(x) + "%"},
                 {"width", coordinate(width) + "%"},
                 {"height", "12"}});
    x += width;
  }
  page.close().close();
}

}  // namespace echelon
