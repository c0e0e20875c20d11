#include "echelon/report/chart.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "echelon/text/units.h"

namespace echelon {
namespace {

constexpr double kWidth = 1000;  // of the stretched drawing, in its own units

struct Drawn {
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

// The range that most values and all smoothed ones are in: a first loss of a
// thousand would press the rest of the curve flat.
void find_range(const std::vector<Drawn>& drawn, Axes& axes) {
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
    if (chart.seconds) {
      labels.push_back(format_seconds(tick));
    } else if (chart.scale == YScale::share) {
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
    const double y = axes.at_y(ticks[i]);
    const auto at = coordinate(y);
    page.empty(
        "line", {{"class", "grid"},
                 {"x1", "0"},
                 {"x2", "100%"},
                 {"y1", at},
                 {"y2", at}});
    page.leaf(
        "text",
        {{"class", "tick"},
         {"x", "-8"},
         {"y", coordinate(y + 4)},
         {"text-anchor", "end"}},
        labels[i]);
  }
}

void draw_x_axis(Markup& page, const Chart& chart, const Axes& axes) {
  const auto y = std::to_string(axes.height);
  page.empty(
      "line",
      {{"class", "axis"}, {"x1", "0"}, {"x2", "100%"}, {"y1", y}, {"y2", y}});
  const auto ticks =
      whole_ticks(axes.first_x, axes.last_x, chart.height > 150 ? 5 : 3);
  for (size_t i = 0; i < ticks.size(); ++i) {
    const double share = axes.share_x(ticks[i]);
    // Labels stay inside of the plot; every second one goes on narrow screens.
    const char* anchor = share < 0.04   ? "start"
                         : share > 0.96 ? "end"
                                        : "middle";
    page.leaf(
        "text",
        {{"class", i % 2 == 1 ? "tick minor" : "tick"},
         {"x", coordinate(100 * share) + "%"},
         {"y", std::to_string(axes.height + 18)},
         {"text-anchor", anchor}},
        format_compact(ticks[i]));
  }
}

std::string path_of(
    const std::vector<Bucket>& buckets, const Axes& axes,
    double Bucket::*value) {
  std::string path;
  for (const auto& b : buckets) {
    path += path.empty() ? "M" : "L";
    path += coordinate(axes.at_x((b.first_x + b.last_x) / 2), 1) + " " +
            coordinate(axes.at_y(b.*value), 1);
  }
  if (buckets.size() == 1) path += "h0";
  return path;
}

std::string band_of(const std::vector<Bucket>& buckets, const Axes& axes) {
  std::string path = path_of(buckets, axes, &Bucket::high);
  for (auto b = buckets.rbegin(); b != buckets.rend(); ++b) {
    path += "L" + coordinate(axes.at_x((b->first_x + b->last_x) / 2), 1) + " " +
            coordinate(axes.at_y(b->low), 1);
  }
  return path + "Z";
}

void draw_path(
    Markup& page, const std::string& css, const std::string& path,
    size_t points) {
  page.empty(
      "path", {{"class", css},
               {"d", path},
               {"vector-effect", "non-scaling-stroke"},
               {"data-points", std::to_string(points)}});
}

void draw_dots(
    Markup& page, const std::string& color, const std::vector<Bucket>& buckets,
    const Axes& axes) {
  std::string path;
  for (const auto& b : buckets) {
    path += "M" + coordinate(axes.at_x(b.last_x), 1) + " " +
            coordinate(axes.at_y(b.mean), 1) + "h0";
  }
  draw_path(page, "dots " + color, path, buckets.size());
}

void draw_curve(Markup& page, const Drawn& drawn, const Axes& axes) {
  const auto& [curve, buckets] = drawn;
  if (buckets.empty()) return;
  const std::string& color = curve->color;
  const size_t count = buckets.size();
  if (curve->style == CurveStyle::raw_and_smooth) {
    const bool exact = count == curve->points.size();
    if (exact) {
      draw_path(
          page, "raw " + color, path_of(buckets, axes, &Bucket::mean), count);
    } else {
      draw_path(page, "band " + color, band_of(buckets, axes), count);
    }
    draw_path(
        page, "line " + color, path_of(buckets, axes, &Bucket::smooth), count);
    return;
  }
  draw_path(
      page, "line " + color, path_of(buckets, axes, &Bucket::mean), count);
  if (curve->style == CurveStyle::dots && count <= 60) {
    draw_dots(page, color, buckets, axes);
  }
}

void draw_caption(
    Markup& page, const Chart& chart, const std::vector<Drawn>& drawn) {
  page.open("figcaption").leaf("h3", {}, chart.title);
  if (!chart.headline.empty()) {
    page.leaf("span", {{"class", "now"}}, chart.headline);
  }
  if (drawn.size() > 1) {
    page.open("span", {{"class", "keys"}});
    for (const auto& d : drawn) {
      page.open("span", {{"class", "key"}});
      page.leaf("i", {{"class", "stroke " + d.curve->color}}, "");
      page.text(d.curve->name).close();
    }
    page.close();
  }
  page.close();
}

}  // namespace

void draw_chart(Markup& page, const Chart& chart) {
  std::vector<Drawn> drawn;
  for (const auto& curve : chart.curves) {
    auto buckets = to_buckets(curve.points, chart.max_buckets);
    if (!buckets.empty()) drawn.push_back({&curve, std::move(buckets)});
  }
  if (drawn.empty()) return;
  Axes axes;
  axes.height = chart.height;
  find_range(drawn, axes);
  choose_scale(chart.scale, axes);

  page.open("figure", {{"class", "chart"}, {"id", chart.id}});
  draw_caption(page, chart, drawn);
  page.open("div", {{"class", "plot"}});
  page.open(
      "svg", {{"width", "100%"},
              {"height", std::to_string(chart.height + 24)},
              {"role", "img"},
              {"aria-labelledby", chart.id + "-t " + chart.id + "-d"}});
  page.leaf("title", {{"id", chart.id + "-t"}}, chart.title);
  page.leaf("desc", {{"id", chart.id + "-d"}}, chart.description);
  draw_y_axis(page, chart, axes);
  draw_x_axis(page, chart, axes);
  page.open(
      "svg", {{"class", "curves"},
              {"width", "100%"},
              {"height", std::to_string(chart.height)},
              {"viewBox", "0 0 1000 " + std::to_string(chart.height)},
              {"preserveAspectRatio", "none"}});
  for (const auto& d : drawn) draw_curve(page, d, axes);
  page.close();
  page.close().close().close();
}

}  // namespace echelon
