// Both pictures are a Plane: points over two logarithmic axes, drawn as SVG.
// Ratios of time, memory and devices are what a reader compares, and on such
// axes equal ratios are equal distances; linear scaling is a straight line. A
// point carries its own text, placed below the plot and shown while the point
// is pointed at, so that the picture needs no script.
#include "echelon/planner/plan_choices.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <set>

#include "echelon/planner/reasons.h"
#include "echelon/report/chart.h"
#include "echelon/report/page.h"
#include "echelon/text/units.h"

namespace echelon::planner {
namespace {

// --- Points over two logarithmic axes ---------------------------------------

struct PlanePoint {
  double x = 0;       // above 0
  double y = 0;       // above 0
  std::string color;  // class: "bw", "ex", "da", "op", "ot"
  std::string title;  // shown while pointed at; may have several lines
  std::string label;  // beside the one that matters, which is outlined

  bool ring() const { return !label.empty(); }
};

struct PlaneLine {
  std::string css;  // "line c1", "level"
  std::vector<std::pair<double, double>> points;
};

// Points over two logarithmic axes. A point says what it is below the picture
// while it is pointed at, reached by the keyboard or tapped.
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
  const auto [low, high] = std::ranges::minmax_element(values);
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
  return ticks.size() < 2 ? report::linear_ticks(range.low, range.high, 4)
                          : ticks;
}

// Widths are percentages and texts are in fixed sizes, so one drawing serves a
// phone, a wide screen and paper.
class PlaneDrawing {
 public:
  PlaneDrawing(report::Markup& page, const Plane& plane)
      : page_(page), plane_(plane) {
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
    below(
        "hint", plane_.id + "-hint",
        "Point at a dot, or tap it, to see its layout.");
    page_.add("<g class='points'>");
    // SVG draws later elements above earlier ones: the outlined points are
    // last.
    for (const bool ring : {false, true}) {
      for (size_t i = 0; i < plane_.points.size(); ++i) {
        if (plane_.points[i].ring() == ring) draw(plane_.points[i], i);
      }
    }
    page_.add("</g></svg></div></figure>");
  }

 private:
  std::string at_x(double x) const {
    return report::coordinate(100 * x_.share(x)) + "%";
  }
  std::string at_y(double y, double below = 0) const {
    return report::coordinate(plane_.height * (1 - y_.share(y)) + below);
  }

  void open() {
    page_.add("<figure class='chart plane' id='{}'><figcaption>", plane_.id);
    report::draw_caption(page_, plane_.title, plane_.headline);
    if (!plane_.keys.empty()) {
      page_.add("<span class='keys'>");
      for (const auto& [css, text] : plane_.keys)
        report::draw_key(page_, css, text);
      page_.add("</span>");
    }
    page_.add(
        "</figcaption><div class='plot'><svg width='100%' height='{}' "
        "role='group' aria-label='{}'>",
        plane_.height + kAxisHeight + kSaysHeight, plane_.description);
  }

  void axes() {
    for (const double tick : ticks_of(y_)) {
      page_.add(
          "<line class='grid' x1='0' x2='100%' y1='{}' y2='{}'/><text "
          "class='tick' x='-8' y='{}' text-anchor='end'>{}</text>",
          at_y(tick), at_y(tick), at_y(tick, 4), plane_.y_text(tick));
    }
    page_.add(
        "<line class='axis' x1='0' x2='100%' y1='{}' y2='{}'/>", plane_.height,
        plane_.height);
    const auto ticks = plane_.x_ticks.empty() ? ticks_of(x_) : plane_.x_ticks;
    for (size_t i = 0; i < ticks.size(); ++i) {
      report::draw_tick(
          page_, i, ticks.size(), x_.share(ticks[i]), plane_.height + 18,
          plane_.x_text(ticks[i]), /*edge=*/0.03);
    }
    page_.add(
        "<text class='tick' x='100%' y='{}' text-anchor='end'>{}</text><text "
        "class='tick' x='4' y='12'>{}</text>",
        plane_.height + 36, plane_.x_name, plane_.y_name);
  }

  void limit() {
    page_.add(
        "<line class='level limit' x1='{}' x2='{}' y1='0' y2='{}'/><text "
        "class='level-name' x='{}' y='28' dx='-6' text-anchor='end'>{}</text>",
        at_x(plane_.x_limit), at_x(plane_.x_limit), plane_.height,
        at_x(plane_.x_limit), plane_.x_limit_name);
  }

  void draw(const PlaneLine& line) {
    for (size_t i = 0; i + 1 < line.points.size(); ++i) {
      const auto& [x1, y1] = line.points[i];
      const auto& [x2, y2] = line.points[i + 1];
      page_.add(
          "<line class='{}' x1='{}' y1='{}' x2='{}' y2='{}'/>", line.css,
          at_x(x1), at_y(y1), at_x(x2), at_y(y2));
    }
  }

  // A text below the axis, as wide as the plot.
  void below(const char* css, const std::string& id, const std::string& text) {
    page_.add(
        "<foreignObject x='0' y='{}' width='100%' height='{}'><p class='{}' "
        "id='{}'>{}</p></foreignObject>",
        plane_.height + kAxisHeight, kSaysHeight, css, id, text);
  }

  void draw(const PlanePoint& point, size_t index) {
    const std::string id = format("{}-{}", plane_.id, index);
    page_.add(
        "<g class='{}' tabindex='0' role='img' aria-labelledby='{}'>",
        point.ring() ? "point ring" : "point", id);
    page_.add(
        "<circle class='{}' cx='{}' cy='{}' r='{}' fill-opacity='{}'/>",
        point.color, at_x(point.x), at_y(point.y), point.ring() ? "7" : "5",
        point.ring() ? "1" : "0.75");
    below("says", id, point.title);
    page_.add("</g>");
    if (point.ring()) label(point);
  }

  void label(const PlanePoint& point) {
    const bool left = x_.share(point.x) > 0.5;
    page_.add(
        "<text class='level-name' x='{}' y='{}' dx='{}' "
        "text-anchor='{}'>{}</text>",
        at_x(point.x), at_y(point.y, 4), left ? "-12" : "12",
        left ? "end" : "start", point.label);
  }

  report::Markup& page_;
  const Plane& plane_;
  Range x_, y_;
};

void draw_plane(report::Markup& page, const Plane& plane) {
  if (!plane.points.empty()) PlaneDrawing(page, plane).run();
}

// --- The choices and the growth ---------------------------------------------

constexpr std::array kColors = {"bw", "da", "ex", "op", "ot"};
constexpr double kGib = 1 << 30;
constexpr double kMostTicks = 6;
constexpr double kWide = 8;  // the most over the least

std::string devices_text(int64_t number) {
  return counted(number, "device");
}

std::string plan_title(const Plan& plan) {
  return format(
      "{}: {}\n{} a step, {} a device, MFU {}", devices_text(plan.devices),
      cost::to_string(plan.strategy), format_seconds(plan.step.step_seconds),
      format_bytes(plan.step.memory.peak_bytes()),
      format_percent(plan.step.model_flops_utilisation));
}

// Next to a point, hence short; its title has the order of the axes as well.
std::string degrees_text(const Plan& plan) {
  Layout degrees = plan.strategy.layout;
  degrees.order = Layout{}.order;
  return to_string(degrees);
}

std::vector<int64_t> device_counts(const std::vector<Plan>& plans) {
  std::set<int64_t> counts;
  for (const auto& plan : plans) counts.insert(plan.devices);
  return {counts.begin(), counts.end()};
}

// Ticks between the least and the most that a layout takes: powers of 2, or
// equal steps where these are too few.
std::vector<double> memory_ticks(const std::vector<Plan>& plans, double limit) {
  double least = limit, most = limit;
  for (const auto& plan : plans) {
    least = std::min(least, plan.step.memory.peak_bytes());
    most = std::max(most, plan.step.memory.peak_bytes());
  }
  std::vector<double> ticks;
  double step = kGib / 8;
  while (kMostTicks * step < most - least) step *= 2;
  const bool wide = most > kWide * least;
  for (double bytes = step; bytes <= most;
       bytes = wide ? 2 * bytes : bytes + step) {
    if (bytes >= least) ticks.push_back(bytes);
  }
  if (ticks.size() > 1) return ticks;
  // Layouts that all take about the same.
  ticks = report::linear_ticks(0.95 * least / kGib, 1.05 * most / kGib, 4);
  for (double& tick : ticks) tick *= kGib;
  return ticks;
}

// For an axis: narrow, and in one unit from a minute on.
std::string tick_text(double seconds) {
  return seconds < 60 ? format_seconds(seconds) : format_count(seconds) + " s";
}

// The best plan on the devices that were asked for; none when nothing fits.
const Plan* best_of(const PlanPage& input) {
  return input.result.plans.empty() ? nullptr : &input.result.plans.front();
}

Plane choices_plane(const PlanPage& input) {
  const double limit = usable_device_bytes(input.request.cluster);
  return {
      .id = "choices",
      .title = "Time against memory against devices",
      .headline =
          format_count(static_cast<int64_t>(input.choices.size())) + " layouts",
      .description =
          "Each layout's time of a step over the memory of its fullest "
          "device, coloured by the number of devices.",
      .x_name = "memory of the fullest device",
      .y_name = "time of a step",
      .x_text = [](double bytes) { return format_bytes(bytes); },
      .y_text = tick_text,
      .x_ticks = memory_ticks(input.choices, limit),
      .height = 340,
      .x_limit = limit,
      .x_limit_name = "what a job may use",
  };
}

void draw_table(report::Markup& page, const std::vector<Plan>& plans) {
  page.add("<details><summary>All of them as a table</summary>");
  report::open_table(
      page, "The layouts in figures",
      {"Strategy", "Devices", "Step", "MFU", "Memory of a device"});
  for (const auto& plan : plans) {
    page.add(
        "<tr><th scope='row'>{}</th><td>{}</td><td>{}</td><td>{}</td>"
        "<td>{}</td></tr>",
        cost::to_string(plan.strategy), format_count(plan.devices),
        format_seconds(plan.step.step_seconds),
        format_percent(plan.step.model_flops_utilisation),
        format_bytes(plan.step.memory.peak_bytes()));
  }
  report::close_table(page);
  page.add("</details>");
}

// Linear scaling from the fewest devices on.
PlaneLine ideal_line(const std::vector<Plan>& growth) {
  const Plan& first = growth.front();
  const auto fewest = static_cast<double>(first.devices);
  const auto most = static_cast<double>(growth.back().devices);
  return {
      .css = "level",
      .points = {
          {fewest, first.step.step_seconds},
          {most, first.step.step_seconds * fewest / most}}};
}

Plane growth_plane(const PlanPage& input) {
  Plane plane{
      .id = "growth",
      .title = format(
          "Time from {} to {} devices",
          format_count(input.growth.front().devices),
          format_count(input.growth.back().devices)),
      .headline =
          "the best layout of each number; dashed: as if nothing were lost",
      .description =
          "The time of a step over the number of devices, for the best "
          "layout of each number.",
      .x_name = "devices",
      .y_name = "time of a step",
      .x_text = [](double devices) { return format_count(devices); },
      .y_text = tick_text,
      .height = 300,
  };
  PlaneLine line{.css = "line c1", .points = {}};
  const Plan* best = best_of(input);
  for (const auto& plan : input.growth) {
    const double devices = static_cast<double>(plan.devices);
    const bool here = best && plan.devices == best->devices;
    plane.x_ticks.push_back(devices);
    plane.points.push_back(
        {devices, plan.step.step_seconds, here ? "ex" : "bw", plan_title(plan),
         here ? degrees_text(plan) : ""});
    line.points.emplace_back(devices, plan.step.step_seconds);
  }
  plane.lines = {ideal_line(input.growth), line};
  return plane;
}

}  // namespace

void draw_choices(report::Markup& page, const PlanPage& input) {
  if (input.choices.empty()) return;
  Plane plane = choices_plane(input);
  const Plan* best = best_of(input);
  const auto counts = device_counts(input.choices);
  const auto color = [&](int64_t devices) {
    const auto at = std::ranges::find(counts, devices);
    return std::string(
        kColors[static_cast<size_t>(at - counts.begin()) % kColors.size()]);
  };
  for (const auto& plan : input.choices) {
    const bool is_best = best && cost::to_string(plan.strategy) ==
                                     cost::to_string(best->strategy);
    plane.points.push_back(
        {plan.step.memory.peak_bytes(), plan.step.step_seconds,
         color(plan.devices), plan_title(plan),
         is_best ? degrees_text(plan) : ""});
  }
  for (const int64_t devices : counts) {
    plane.keys.emplace_back(color(devices), devices_text(devices));
  }
  page.add("<h2>What else there is</h2>");
  draw_plane(page, plane);
  draw_table(page, input.choices);
}

void draw_growth(report::Markup& page, const PlanPage& input) {
  if (input.growth.empty()) return;
  page.add("<h2>More and fewer devices</h2>");
  draw_plane(page, growth_plane(input));
  const int64_t fewest = input.growth.front().devices;
  if (fewest > 8) {
    page.add(
        "<p class='note'>Each number is twice the one before; none below {} "
        "holds a plan for this model and batch.</p>",
        devices_text(fewest));
  }
}

}  // namespace echelon::planner
