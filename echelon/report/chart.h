// A chart of curves over steps, as a figure with inline SVG.
//
// Widths are percentages and texts are in fixed sizes, so one drawing serves
// a phone, a wide screen and paper. Colours are classes of the report's style.
#pragma once

#include <string>
#include <vector>

#include "echelon/report/markup.h"
#include "echelon/report/series.h"

namespace echelon {

enum class CurveStyle {
  raw_and_smooth,  // every value pale, a smoothed line on top
  line,
  dots,  // a line with a dot at each point
};

struct Curve {
  std::string name;   // in the legend, when there are several
  std::string color;  // class: "c1" or "c2"
  CurveStyle style = CurveStyle::line;
  std::vector<Point> points;
};

enum class YScale {
  fit,        // the range of the values
  from_zero,  // 0 is in the range
  share,      // 0 to 1 shown as per cent, the top at 1
  automatic,  // logarithmic when positive and over a wide range, else fit
};

struct Chart {
  std::string id;  // unique in the page
  std::string title;
  std::string headline;     // the one value to take away: "0.041 at the end"
  std::string description;  // for those who do not see it
  YScale scale = YScale::fit;
  bool seconds = false;  // values are seconds; ticks get a fitting unit
  int height = 200;      // of the plot, in pixels
  size_t max_buckets = 360;
  std::vector<Curve> curves;
};

/// Nothing for a chart without a finite value.
void draw_chart(Markup& page, const Chart& chart);

}  // namespace echelon
