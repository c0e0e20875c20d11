// A curve of any length becomes at most `max_buckets` buckets, each with its
// least, greatest, mean and smoothed value, so that a page stays small and no
// spike is averaged away. Smoothing fits a line around each point, twice, in
// linear time by running sums. Ticks are 1, 2 or 5 times a power of ten.
#include "echelon/report/chart.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <ranges>

#include "echelon/report/page.h"
#include "echelon/text/units.h"

namespace echelon::report {
namespace {

// --- Points and ticks -------------------------------------------------------

// Sums and ranges of what is drawn stay finite.
constexpr double kLargest = 1e150;

double round_step(double range, int count) {
  const double rough = range / std::max(1, count);
  const double power = std::pow(10, std::floor(std::log10(rough)));
  for (double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough * 0.999) return factor * power;
  }
  return 10 * power;
}

std::vector<double> ticks_every(double low, double high, double step) {
  std::vector<double> ticks;
  const double first = std::ceil(low / step - 1e-9);
  const double last = std::floor(high / step + 1e-9);
  for (double i = first; i <= last && ticks.size() < 100; ++i) {
    ticks.push_back(i * step);
  }
  return ticks;
}

// A range may hold a single multiple of a step: then the step is smaller, but
// no smaller than `least`.
std::vector<double>
ticks_of_steps(double low, double high, int count, double least) {
  if (!(high > low)) return {low};
  std::vector<double> ticks;
  for (; ticks.size() < 2 && count < 100; count = 2 * std::max(1, count)) {
    const double step = std::max(least, round_step(high - low, count));
    ticks = ticks_every(low, high, step);
  }
  return ticks;
}

// Each value becomes that of a line fitted to up to `reach` points on either
// side. Away from the ends this is their mean; near the ends it follows their
// slope.
std::vector<Point> smoothed(const std::vector<Point>& points, size_t reach) {
  const size_t count = points.size();
  std::vector<double> sums(count + 1, 0.0);     // of y, of all points before
  std::vector<double> moments(count + 1, 0.0);  // of index * y
  for (size_t i = 0; i < count; ++i) {
    sums[i + 1] = sums[i] + points[i].y;
    moments[i + 1] = moments[i] + static_cast<double>(i) * points[i].y;
  }
  std::vector<Point> result = points;
  for (size_t i = 0; i < count; ++i) {
    const size_t begin = i - std::min(i, reach);
    const size_t end = std::min(i + reach + 1, count);
    const auto n = static_cast<double>(end - begin);
    const double middle = static_cast<double>(begin + end - 1) / 2;
    const double mean = (sums[end] - sums[begin]) / n;
    const double spread = n * (n * n - 1) / 12;  // of n whole numbers
    const double slope =
        spread > 0
            ? (moments[end] - moments[begin] - n * middle * mean) / spread
            : 0;
    result[i].y = mean + slope * (static_cast<double>(i) - middle);
  }
  return result;
}

}  // namespace

std::vector<Bucket>
to_buckets(const std::vector<Point>& points, size_t max_buckets) {
  std::vector<Point> finite = points;
  std::erase_if(finite, [](const Point& p) {
    return !(std::isfinite(p.x) && std::abs(p.y) < kLargest);
  });
  const size_t count = finite.size();
  const size_t num = std::min(count, max_buckets);
  // Twice half the width leaves no corners.
  const size_t reach = std::max<size_t>(count < 20 ? 1 : 2, count / 60);
  const auto smooth = smoothed(smoothed(finite, reach), reach);
  std::vector<Bucket> buckets;
  for (size_t b = 0; b < num; ++b) {
    const size_t begin = b * count / num;
    const size_t end = (b + 1) * count / num;
    Bucket bucket{
        .first_x = finite[begin].x,
        .last_x = finite[end - 1].x,
        .low = finite[begin].y,
        .high = finite[begin].y};
    for (size_t i = begin; i < end; ++i) {
      const double y = finite[i].y;
      bucket.low = std::min(bucket.low, y);
      bucket.high = std::max(bucket.high, y);
      bucket.mean += y / static_cast<double>(end - begin);
      bucket.smooth += smooth[i].y / static_cast<double>(end - begin);
    }
    buckets.push_back(bucket);
  }
  return buckets;
}

std::vector<double> linear_ticks(double low, double high, int count) {
  return ticks_of_steps(low, high, count, 0);
}

std::vector<double> whole_ticks(double low, double high, int count) {
  return ticks_of_steps(low, high, count, 1);
}

std::vector<double> log_ticks(double low, double high) {
  const double decades = std::log10(high / low);
  std::vector<double> ticks;
  for (double power = std::floor(std::log10(low));
       power <= std::ceil(std::log10(high)) && ticks.size() < 1000; ++power) {
    for (double factor : {1.0, 2.0, 5.0}) {
      const double tick = factor * std::pow(10, power);
      const bool shown = factor == 1 || decades < 2.2;
      if (shown && tick >= low * 0.999 && tick <= high * 1.001) {
        ticks.push_back(tick);
      }
    }
  }
  return ticks;
}

int tick_decimals(const std::vector<double>& ticks) {
  if (ticks.size() < 2) return 2;
  double step = ticks[1] - ticks[0];
  for (size_t i = 1; i < ticks.size(); ++i) {
    step = std::min(step, ticks[i] - ticks[i - 1]);
  }
  if (!(step > 0)) return 2;
  return std::clamp(
      static_cast<int>(std::ceil(-std::log10(step) - 1e-9)), 0, 9);
}

void draw_time_axis(
    Markup& page, double length, int count, int bottom, int below,
    const std::function<std::string(double)>& text) {
  const auto ticks = linear_ticks(0, length, count);
  for (size_t i = 0; i < ticks.size(); ++i) {
    const double share = ticks[i] / length;
    const auto x = coordinate(100 * share, 3) + "%";
    page.add(
        "<line class='grid' x1='{}' x2='{}' y1='-4' y2='{}'/>", x, x, bottom);
    draw_tick(
        page, i, ticks.size(), share, bottom + below,
        ticks[i] == 0 ? "0" : text(ticks[i]));
  }
}

// --- Curves -----------------------------------------------------------------

namespace {

constexpr double kWidth = 1000;  // of the stretched drawing, in its own units

struct DrawnCurve {
  const Curve* curve;
  std::vector<Bucket> buckets;
};

struct Axes {
  double first_x = 0;
  double last_x = 1;
  double low = 0;
  double high = 1;
  bool logarithmic = false;
  int height = 0;

  double share_x(double x) const {
    return last_x > first_x ? (x - first_x) / (last_x - first_x) : 0.5;
  }
  double at_x(double x) const { return kWidth * share_x(x); }
  double at_y(double y) const {
    const double share =
        logarithmic ? std::log(std::max(y, low) / low) / std::log(high / low)
                    : (y - low) / (high - low);
    return height * (1 - std::clamp(share, 0.0, 1.0));
  }
};

// The range that holds most values and all smoothed ones: a first loss of a
// thousand would flatten the rest of the curve.
void find_range(const std::vector<DrawnCurve>& drawn, Axes& axes) {
  std::vector<double> highs;
  axes.low = std::numeric_limits<double>::infinity();
  axes.high = -axes.low;
  axes.first_x = axes.low;
  axes.last_x = -axes.low;
  for (const auto& d : drawn) {
    const bool smooth = d.curve->style == CurveStyle::raw_and_smooth;
    for (const auto& b : d.buckets) {
      axes.first_x = std::min(axes.first_x, b.first_x);
      axes.last_x = std::max(axes.last_x, b.last_x);
      axes.low = std::min(axes.low, b.low);
      axes.high = std::max(axes.high, smooth ? b.smooth : b.high);
      if (smooth) highs.push_back(b.high);
    }
  }
  if (axes.first_x > 0 && axes.first_x < 0.34 * axes.last_x) axes.first_x = 0;
  if (highs.empty()) return;
  std::sort(highs.begin(), highs.end());
  const double most = highs[(highs.size() - 1) * 98 / 100];
  axes.high = std::max(axes.high, most);
  const double top = highs.back();
  if (top - axes.low < 1.6 * (axes.high - axes.low)) axes.high = top;
}

void choose_scale(YScale scale, Axes& axes) {
  if (scale == YScale::share) {
    axes.high = std::max(axes.high, 1.0);
    const double low = axes.low - 0.1 * (axes.high - axes.low);
    axes.low = low < 0.35 ? 0 : std::floor(low * 20) / 20;
    return;
  }
  if (scale == YScale::from_zero) axes.low = std::min(axes.low, 0.0);
  axes.logarithmic =
      scale == YScale::automatic && axes.low > 0 && axes.high > 30 * axes.low;
  if (axes.logarithmic) {
    axes.low /= 1.15;
    axes.high *= 1.15;
    return;
  }
  double range = axes.high - axes.low;
  if (!(range > 1e-12 * std::abs(axes.high))) {
    range = std::max(1e-12, std::abs(axes.high));
    if (scale != YScale::from_zero) axes.low -= 0.1 * range;
  }
  const bool touches_zero = axes.low >= 0 && axes.low < 0.25 * range;
  axes.low = touches_zero || axes.low == 0 ? 0 : axes.low - 0.06 * range;
  axes.high += 0.06 * range;
}

std::vector<double> y_ticks(const Axes& axes) {
  if (!axes.logarithmic) {
    return linear_ticks(axes.low, axes.high, axes.height / 40);
  }
  auto ticks = log_ticks(axes.low, axes.high);
  while (ticks.size() > 7) {
    std::vector<double> half;
    for (size_t i = 0; i < ticks.size(); i += 2) half.push_back(ticks[i]);
    ticks = half;
  }
  return ticks;
}

std::vector<std::string> y_labels(
    const Chart& chart, const std::vector<double>& ticks, bool logarithmic) {
  std::vector<std::string> labels;
  const int decimals = tick_decimals(ticks);
  for (double tick : ticks) {
    if (chart.scale == YScale::share) {
      labels.push_back(
          coordinate(100 * tick, std::max(0, decimals - 2)) + " %");
    } else if (logarithmic || decimals > 4 || std::abs(tick) >= 1e4) {
      labels.push_back(format_compact(tick));
    } else {
      labels.push_back(coordinate(tick, decimals));
    }
  }
  return labels;
}

void draw_y_axis(Markup& page, const Chart& chart, const Axes& axes) {
  const auto ticks = y_ticks(axes);
  const auto labels = y_labels(chart, ticks, axes.logarithmic);
  for (size_t i = 0; i < ticks.size(); ++i) {
    draw_y_tick(page, axes.at_y(ticks[i]), labels[i]);
  }
}

void draw_x_axis(Markup& page, const Chart& chart, const Axes& axes) {
  const int y = axes.height;
  page.add("<line class='axis' x1='0' x2='100%' y1='{}' y2='{}'/>", y, y);
  const auto ticks =
      whole_ticks(axes.first_x, axes.last_x, chart.height > 150 ? 5 : 3);
  for (size_t i = 0; i < ticks.size(); ++i) {
    draw_tick(
        page, i, ticks.size(), axes.share_x(ticks[i]), y + 18,
        format_compact(ticks[i]));
  }
}

std::string place(double x, double y) {
  return coordinate(x, 1) + " " + coordinate(y, 1);
}

std::string path_of(
    const std::vector<Bucket>& buckets, const Axes& axes,
    double Bucket::*value) {
  std::string path;
  for (const auto& b : buckets) {
    path += (path.empty() ? "M" : "L") +
            place(axes.at_x(b.middle_x()), axes.at_y(b.*value));
  }
  return buckets.size() == 1 ? path + "h0" : path;
}

std::string band_of(const std::vector<Bucket>& buckets, const Axes& axes) {
  std::string path = path_of(buckets, axes, &Bucket::high);
  for (const auto& b : buckets | std::views::reverse) {
    path += "L" + place(axes.at_x(b.middle_x()), axes.at_y(b.low));
  }
  return path + "Z";
}

void draw_curve(Markup& page, const DrawnCurve& drawn, const Axes& axes) {
  const auto& [curve, buckets] = drawn;
  const size_t count = buckets.size();
  const auto draw = [&](const char* css, const std::string& path) {
    page.add(
        "<path class='{}{}' d='{}' vector-effect='non-scaling-stroke' "
        "data-points='{}'/>",
        css, curve->color, path, count);
  };
  if (curve->style == CurveStyle::raw_and_smooth) {
    if (count == curve->points.size()) {
      draw("raw ", path_of(buckets, axes, &Bucket::mean));
    } else {
      draw("band ", band_of(buckets, axes));
    }
    draw("line ", path_of(buckets, axes, &Bucket::smooth));
    return;
  }
  draw("line ", path_of(buckets, axes, &Bucket::mean));
  if (curve->style != CurveStyle::dots || count > 60) return;
  std::string dots;
  for (const auto& b : buckets) {
    dots += "M" + place(axes.at_x(b.last_x), axes.at_y(b.mean)) + "h0";
  }
  draw("dots ", dots);
}

void draw_chart_caption(
    Markup& page, const Chart& chart, const std::vector<DrawnCurve>& drawn) {
  page.add("<figcaption>");
  draw_caption(page, chart.title, chart.headline);
  if (drawn.size() > 1) {
    page.add("<span class='keys'>");
    for (const auto& d : drawn) {
      page.add(
          "<span class='key'><i class='stroke {}'></i>{}</span>",
          d.curve->color, d.curve->name);
    }
    page.add("</span>");
  }
  page.add("</figcaption>");
}

}  // namespace

void draw_chart(Markup& page, const Chart& chart) {
  std::vector<DrawnCurve> drawn;
  for (const auto& curve : chart.curves) {
    auto buckets = to_buckets(curve.points, chart.max_buckets);
    if (!buckets.empty()) drawn.push_back({&curve, std::move(buckets)});
  }
  if (drawn.empty()) return;
  Axes axes;
  axes.height = chart.height;
  find_range(drawn, axes);
  choose_scale(chart.scale, axes);

  page.add("<figure class='chart' id='{}'>", chart.id);
  draw_chart_caption(page, chart, drawn);
  page.add("<div class='plot'>");
  open_svg(page, chart.id, chart.height + 24, chart.title, chart.description);
  draw_y_axis(page, chart, axes);
  draw_x_axis(page, chart, axes);
  page.add(
      "<svg class='curves' width='100%' height='{}' viewBox='0 0 1000 {}' "
      "preserveAspectRatio='none'>",
      chart.height, chart.height);
  for (const auto& d : drawn) draw_curve(page, d, axes);
  page.add("</svg></svg></div></figure>");
}

// --- Stacked bars -----------------------------------------------------------

namespace {

constexpr int kRowHeight = 34;
constexpr int kLineHeight = 15;
constexpr size_t kMostInLine = 42;      // letters beside the total, on a phone
constexpr int kLimitTop = 16;           // below the name of the limit
constexpr int kBelowBar = 10;           // that the last row does not need
constexpr double kLeastDrawn = 0.0005;  // of the width
constexpr double kLeastInLegend = 0.002;

// The lines of a row's name, broken after commas and spaces.
std::vector<std::string> name_lines(const StackedRow& row) {
  std::vector<std::string> lines;
  std::string rest = row.name;
  while (rest.size() > kMostInLine) {
    const size_t end = rest.find_last_of(", ", kMostInLine - 1);
    if (end == std::string::npos) break;
    lines.push_back(rest.substr(0, end + 1));
    rest.erase(0, end + 1);
  }
  lines.push_back(rest);
  return lines;
}

int row_height(const StackedRow& row) {
  return kRowHeight +
         kLineHeight * static_cast<int>(name_lines(row).size() - 1);
}

// The name and the total, which leaves room for a limit at the end of the row.
// Returns where the last line of the name is.
int draw_words(
    Markup& page, const StackedBars& bars, const StackedRow& row, int top) {
  const auto lines = name_lines(row);
  page.add("<text class='name' x='0' y='{}'>{}", top, lines[0]);
  for (size_t i = 1; i < lines.size(); ++i) {
    page.add("<tspan x='0' dy='{}'>{}</tspan>", kLineHeight, lines[i]);
  }
  page.add(
      "</text><text class='share' x='100%' y='{}' text-anchor='end' "
      "dx='{}'>{}</text>",
      top, bars.limit > 0 ? "-8" : "0", row.total);
  return top + kLineHeight * static_cast<int>(lines.size() - 1);
}

void draw_bar(Markup& page, const StackedRow& row, double whole, int top) {
  double x = 0;
  for (const auto& part : row.parts) {
    const double begin = std::min(1.0, x / whole);
    x += part.value;
    const double width = std::min(1.0, x / whole) - begin;
    if (width < kLeastDrawn) continue;
    page.add(
        "<rect class='{}' x='{}%' y='{}' width='{}%' height='13'>", part.color,
        100 * begin, top + 5, 100 * width);
    page.add("<title>{}: {} {}</title></rect>", row.name, part.name, part.text);
  }
}

std::vector<StackedPart> legend_of(const StackedBars& bars, double whole) {
  std::vector<StackedPart> kinds;
  for (const auto& row : bars.rows) {
    for (const auto& part : row.parts) {
      if (part.value > kLeastInLegend * whole &&
          std::ranges::find(kinds, part.name, &StackedPart::name) ==
              kinds.end()) {
        kinds.push_back(part);
      }
    }
  }
  return kinds;
}

// A line through all rows, with a step where a row has a limit of its own.
void draw_limits(
    Markup& page, const StackedBars& bars, double whole, int top, int height) {
  const auto limit_x = [&](double limit) {
    return coordinate(100 * std::min(1.0, limit / whole)) + "%";
  };
  int begin = kLimitTop;
  int end = top - kRowHeight / 2;
  for (const auto& row : bars.rows) {
    const std::string x = limit_x(row.limit > 0 ? row.limit : bars.limit);
    end += row_height(row);
    page.add(
        "<line class='level limit' x1='{}' x2='{}' y1='{}' y2='{}'/>", x, x,
        begin, std::min(end, height));
    begin = end;
  }
  page.add(
      "<text class='level-name' x='{}' y='11' text-anchor='end'>{}</text>",
      limit_x(bars.limit), bars.limit_name);
}

}  // namespace

double StackedRow::sum() const {
  double sum = 0;
  for (const auto& part : parts) sum += part.value;
  return sum;
}

void draw_stacked_bars(Markup& page, const StackedBars& bars) {
  double whole = bars.whole;
  if (whole <= 0) {
    for (const auto& row : bars.rows) whole = std::max(whole, row.sum());
  }
  if (!(whole > 0)) whole = 1;
  page.add(
      "<figure class='chart' id='{}'><figcaption><h3>{}</h3><span "
      "class='keys'>",
      bars.id, bars.title);
  for (const auto& kind : legend_of(bars, whole)) {
    draw_key(page, kind.color, kind.name);
  }
  page.add("</span></figcaption>");
  const int top = bars.limit > 0 ? 34 : 14;
  int height = top - kBelowBar;
  for (const auto& row : bars.rows) height += row_height(row);
  open_svg(page, bars.id, height, bars.title, bars.description);
  int y = top;
  for (const auto& row : bars.rows) {
    draw_bar(page, row, whole, draw_words(page, bars, row, y));
    y += row_height(row);
  }
  if (bars.limit > 0) draw_limits(page, bars, whole, top, height);
  page.add("</svg></figure>");
}

}  // namespace echelon::report
