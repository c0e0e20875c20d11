// Charts with two axes, as figures with inline SVG: curves over steps, and rows
// of stacked bars.
//
// Widths are percentages and texts are in fixed sizes, so one drawing serves
// a phone, a wide screen and paper. Colours are classes of assets/report.css.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "echelon/report/markup.h"

namespace echelon::report {

// --- Points and ticks -------------------------------------------------------

struct Point {
  double x = 0;
  double y = 0;
};

/// A stretch of a curve: its range, the least and the greatest value in it, its
/// mean, and the mean of the smoothed curve over it.
struct Bucket {
  double first_x = 0;
  double last_x = 0;
  double low = 0;
  double high = 0;
  double mean = 0;
  double smooth = 0;

  double middle_x() const { return (first_x + last_x) / 2; }
};

/// At most `max_buckets` stretches of equally many points; points that are not
/// finite, or beyond 1e150, are left out. The smoothed curve is the mean over
/// about 1/15 of the points around each, a fitted line near the ends; it does
/// not lag behind.
std::vector<Bucket>
to_buckets(const std::vector<Point>& points, size_t max_buckets);

/// Values at equal and round distances (1, 2, 5 times a power of ten) inside
/// [low, high], about `count` of them, at least two. One where low is high.
std::vector<double> linear_ticks(double low, double high, int count);
/// Powers of ten inside [low, high]; their 2- and 5-fold too when few.
std::vector<double> log_ticks(double low, double high);
/// As linear_ticks, whole numbers only.
std::vector<double> whole_ticks(double low, double high, int count);

/// An axis of time from 0 to `length`: about `count` vertical lines from above
/// the plot down to `bottom`, with labels `below` it that `text` gives.
void draw_time_axis(
    Markup& page, double length, int count, int bottom, int below,
    const std::function<std::string(double)>& text);

/// Decimals that tell neighbouring ticks apart.
int tick_decimals(const std::vector<double>& ticks);

// --- Curves -----------------------------------------------------------------

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
  int height = 200;  // of the plot, in pixels
  size_t max_buckets = 360;
  std::vector<Curve> curves;
};

/// Nothing for a chart without a finite value.
void draw_chart(Markup& page, const Chart& chart);

// --- Stacked bars -----------------------------------------------------------

struct StackedPart {
  std::string color;  // a fill of assets/report.css: "bw"
  std::string name;   // in the legend; a name has one colour
  double value = 0;
  std::string text;  // "12.5 ms", shown while pointed at
};

struct StackedRow {
  std::string name;
  std::string total;  // at the other end of the row
  std::vector<StackedPart> parts;
  double limit = 0;  // of this row; 0: that of all

  double sum() const;
};

struct StackedBars {
  std::string id;  // unique in the page
  std::string title;
  std::string description;  // for those who do not see it
  std::vector<StackedRow> rows;
  double whole = 0;  // what the width stands for; 0: the longest row
  double limit = 0;  // a vertical line; 0: none
  std::string limit_name;
};

/// Bars are clipped at `whole`; parts too narrow to see are left out.
void draw_stacked_bars(Markup& page, const StackedBars& bars);

}  // namespace echelon::report
