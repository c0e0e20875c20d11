#include "echelon/planner/plane.h"

#include <algorithm>
#include <cmath>

#include "echelon/report/page.h"

namespace echelon {
namespace {

constexpr int kAxisHeight = 42;  // below the plot: ticks and the axis' name
constexpr int kSaysHeight = 62;  // below that: what a point says

struct Range {
  double low = 0;
  double high = 0;

  double share(double value) const {
    return std::log(value / low) / std::log(high / low);
  }
};

Range range_of(std::vector<double> values, double most_room) {
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  const double room =
      std::max(1.08, std::pow(std::max(1.0, *high / *low), most_room));
  return {*low / room, *high * room};
}

std::vector<double> ticks_of(const Range& range) {
  std::vector<double> ticks;
  const bool wide = range.high / range.low > 300;
  for (double decade = std::pow(10, std::floor(std::log10(range.low)));
       decade < range.high; decade *= 10) {
    for (const double step : {1.0, 2.0, 5.0}) {
      if (wide && step != 1.0) continue;
      const double tick = decade * step;
      if (tick >= range.low && tick <= range.high) ticks.push_back(tick);
    }
  }
  return ticks;
}

class Drawer {
 public:
  Drawer(Markup& page, const Plane& plane) : page_(page), plane_(plane) {
    std::vector<double> xs, ys;
    for (const auto& point : plane.points) {
      xs.push_back(point.x);
      ys.push_back(point.y);
    }
    for (const auto& line : plane.lines) {
      for (const auto& [x, y] : line.points) ys.push_back(y);
    }
    if (plane.x_limit > 0) xs.push_back(plane.x_limit);
    x_ = range_of(xs, 0.04);
    y_ = range_of(ys, 0.08);
  }

  void run() {
    open();
    axes();
    for (const auto& line : plane_.lines) draw(line);
    if (plane_.x_limit > 0) limit();
    hint();
    page_.open("g", {{"class", "points"}});
    for (const bool ring : {false, true}) {
      for (size_t i = 0; i < plane_.points.size(); ++i) {
        if (plane_.points[i].ring == ring) draw(plane_.points[i], i);
      }
    }
    page_.close().close().close().close();
  }

 private:
  std::string at_x(double x) const {
    return coordinate(100 * x_.share(x)) + "%";
  }
  std::string at_y(double y, double below = 0) const {
    return coordinate(plane_.height * (1 - y_.share(y)) + below);
  }

  void open() {
    page_.open("figure", {{"class", "chart plane"}, {"id", plane_.id}});
    page_.open("figcaption").leaf("h3", {}, plane_.title);
    if (!plane_.headline.empty()) {
      page_.leaf("span", {{"class", "now"}}, plane_.headline);
    }
    if (!plane_.keys.empty()) {
      page_.open("span", {{"class", "keys"}});
      for (const auto& [css, text] : plane_.keys) {
        draw_key(page_, css.c_str(), text.c_str());
      }
      page_.close();
    }
    page_.close().open("div", {{"class", "plot"}});
    page_.open(
        "svg",
        {{"width", "100%"},
         {"height", std::to_string(plane_.height + kAxisHeight + kSaysHeight)},
         {"role", "group"},
         {"aria-label", plane_.description}});
  }

  void axes() {
    for (const double tick : ticks_of(y_)) {
      page_.empty(
          "line", {{"class", "grid"},
                   {"x1", "0"},
                   {"x2", "100%"},
                   {"y1", at_y(tick)},
                   {"y2", at_y(tick)}});
      page_.leaf(
          "text",
          {{"class", "tick"},
           {"x", "-8"},
           {"y", at_y(tick, 4)},
           {"text-anchor", "end"}},
          plane_.y_text(tick));
    }
    const std::string bottom = std::to_string(plane_.height);
    page_.empty(
        "line", {{"class", "axis"},
                 {"x1", "0"},
                 {"x2", "100%"},
                 {"y1", bottom},
                 {"y2", bottom}});
    x_ticks();
    page_.leaf(
        "text",
        {{"class", "tick"},
         {"x", "100%"},
         {"y", std::to_string(plane_.height + 36)},
         {"text-anchor", "end"}},
        plane_.x_name);
    page_.leaf(
        "text", {{"class", "tick"}, {"x", "4"}, {"y", "12"}}, plane_.y_name);
  }

  void x_ticks() {
    const auto ticks = plane_.x_ticks.empty() ? ticks_of(x_) : plane_.x_ticks;
    bool minor = false;
    for (const double tick : ticks) {
      const double share = x_.share(tick);
      const char* anchor = share < 0.03   ? "start"
                           : share > 0.97 ? "end"
                                          : "middle";
      page_.leaf(
          "text",
          {{"class", minor ? "tick minor" : "tick"},
           {"x", at_x(tick)},
           {"y", std::to_string(plane_.height + 18)},
           {"text-anchor", anchor}},
          plane_.x_text(tick));
      minor = !minor;
    }
  }

  void limit() {
    page_.empty(
        "line", {{"class", "level limit"},
                 {"x1", at_x(plane_.x_limit)},
                 {"x2", at_x(plane_.x_limit)},
                 {"y1", "0"},
                 {"y2", std::to_string(plane_.height)}});
    page_.leaf(
        "text",
        {{"class", "level-name"},
         {"x", at_x(plane_.x_limit)},
         {"y", "12"},
         {"dx", "-6"},
         {"text-anchor", "end"}},
        plane_.x_limit_name);
  }

  void draw(const PlaneLine& line) {
    for (size_t i = 0; i + 1 < line.points.size(); ++i) {
      const auto& [x1, y1] = line.points[i];
      const auto& [x2, y2] = line.points[i + 1];
      page_.empty(
          "line", {{"class", line.css},
                   {"x1", at_x(x1)},
                   {"y1", at_y(y1)},
                   {"x2", at_x(x2)},
                   {"y2", at_y(y2)}});
    }
  }

  void hint() {
    below("hint", "", "Point at a dot, or tap it, to see its layout.");
  }

  // A text below the axis, as wide as the plot.
  void below(const char* css, const std::string& id, const std::string& text) {
    page_.open(
        "foreignObject", {{"x", "0"},
                          {"y", std::to_string(plane_.height + kAxisHeight)},
                          {"width", "100%"},
                          {"height", std::to_string(kSaysHeight)}});
    if (id.empty()) {
      page_.leaf("p", {{"class", css}}, text);
    } else {
      page_.leaf("p", {{"class", css}, {"id", id}}, text);
    }
    page_.close();
  }

  void draw(const PlanePoint& point, size_t index) {
    const std::string id = plane_.id + "-" + std::to_string(index);
    page_.open(
        "g", {{"class", point.ring ? "point ring" : "point"},
              {"tabindex", "0"},
              {"role", "img"},
              {"aria-labelledby", id}});
    page_.empty(
        "circle", {{"class", point.color},
                   {"cx", at_x(point.x)},
                   {"cy", at_y(point.y)},
                   {"r", point.ring ? "7" : "5"},
                   {"fill-opacity", point.ring ? "1" : "0.75"}});
    below("says", id, point.title);
    page_.close();
    if (!point.label.empty()) label(point);
  }

  void label(const PlanePoint& point) {
    const bool left = x_.share(point.x) > 0.5;
    page_.leaf(
        "text",
        {{"class", "level-name"},
         {"x", at_x(point.x)},
         {"y", at_y(point.y, 4)},
         {"dx", left ? "-12" : "12"},
         {"text-anchor", left ? "end" : "start"}},
        point.label);
  }

  Markup& page_;
  const Plane& plane_;
  Range x_, y_;
};

}  // namespace

void draw_plane(Markup& page, const Plane& plane) {
  if (plane.points.empty()) return;
  Drawer(page, plane).run();
}

}  // namespace echelon
