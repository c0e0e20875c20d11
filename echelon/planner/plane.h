// Points over two logarithmic axes, as a figure with inline SVG.
//
// Widths are percentages and texts are in fixed sizes, so one drawing serves a
// phone, a wide screen and paper. A point says what it is below the picture
// while it is pointed at, reached by the keyboard or tapped. The page needs
// kPlaneStyle (plane_style.h).
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "echelon/report/markup.h"

namespace echelon {

struct PlanePoint {
  double x = 0;       // above 0
  double y = 0;       // above 0
  std::string color;  // class: "bw", "ex", "da", "op", "ot"
  std::string title;  // what it says; may have several lines
  std::string label;  // beside it; may be empty
  bool ring = false;  // the one that matters
};

struct PlaneLine {
  std::string css;  // "line c1", "level"
  std::vector<std::pair<double, double>> points;
};

struct Plane {
  std::string id;  // unique in the page
  std::string title;
  std::string headline;     // what to take away
  std::string description;  // for those who do not see it
  std::string x_name, y_name;
  std::function<std::string(double)> x_text, y_text;  // of ticks
  std::vector<double> x_ticks;  // empty: 1, 2 and 5 of each decade
  int height = 300;             // of the plot, in pixels
  std::vector<PlanePoint> points;
  std::vector<PlaneLine> lines;
  double x_limit = 0;  // a vertical line; 0: none
  std::string x_limit_name;
  std::vector<std::pair<std::string, std::string>> keys;  // class, meaning
};

/// Nothing without a point.
void draw_plane(Markup& page, const Plane& plane);

}  // namespace echelon
