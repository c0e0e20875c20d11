#include "echelon/report/stacked_bars.h"

#include <algorithm>

#include "echelon/report/page.h"

namespace echelon {
namespace {

constexpr int kRowHeight = 34;
constexpr int kLimitTop = 16;           // below the name of the limit
constexpr int kBelowBar = 10;           // that the last row does not need
constexpr double kLeastDrawn = 0.0005;  // of the width
constexpr double kLeastInLegend = 0.002;

// Beside a limit that is at the end.
void draw_words(
    Markup& page, const StackedBars& bars, const StackedRow& row, int top) {
  const std::string y = std::to_string(top);
  page.leaf("text", {{"class", "name"}, {"x", "0"}, {"y", y}}, row.name);
  page.leaf(
      "text",
      {{"class", "share"},
       {"x", "100%"},
       {"y", y},
       {"text-anchor", "end"},
       {"dx", bars.limit > 0 ? "-8" : "0"}},
      row.total);
}

void draw_bar(Markup& page, const StackedRow& row, double whole, int top) {
  double x = 0;
  for (const auto& part : row.parts) {
    const double begin = std::min(1.0, x / whole);
    x += part.value;
    const double width = std::min(1.0, x / whole) - begin;
    if (width < kLeastDrawn) continue;
    page.open(
        "rect", {{"class", part.color},
                 {"x", coordinate(100 * begin) + "%"},
                 {"y", std::to_string(top + 5)},
                 {"width", coordinate(100 * width) + "%"},
                 {"height", "13"}});
    page.leaf("title", {}, row.name + ": " + part.name + " " + part.text)
        .close();
  }
}

std::vector<StackedPart> legend_of(const StackedBars& bars, double whole) {
  std::vector<StackedPart> kinds;
  for (const auto& row : bars.rows) {
    for (const auto& part : row.parts) {
      const bool known = std::any_of(
          kinds.begin(), kinds.end(),
          [&](const StackedPart& kind) { return kind.name == part.name; });
      if (!known && part.value > kLeastInLegend * whole) kinds.push_back(part);
    }
  }
  return kinds;
}

// A line through all rows; a row's own limit is where it is.
void draw_limits(
    Markup& page, const StackedBars& bars, double whole, int top, int height) {
  const auto place = [&](double limit) {
    return coordinate(100 * std::min(1.0, limit / whole)) + "%";
  };
  int begin = kLimitTop;
  int end = top + kRowHeight / 2;
  for (const auto& row : bars.rows) {
    const std::string x = place(row.limit > 0 ? row.limit : bars.limit);
    page.empty(
        "line", {{"class", "level limit"},
                 {"x1", x},
                 {"x2", x},
                 {"y1", std::to_string(begin)},
                 {"y2", std::to_string(std::min(end, height))}});
    begin = end;
    end += kRowHeight;
  }
  page.leaf(
      "text",
      {{"class", "level-name"},
       {"x", place(bars.limit)},
       {"y", "11"},
       {"text-anchor", "end"}},
      bars.limit_name);
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
  page.open("figure", {{"class", "chart"}, {"id", bars.id}});
  page.open("figcaption").leaf("h3", {}, bars.title);
  page.open("span", {{"class", "keys"}});
  for (const auto& kind : legend_of(bars, whole)) {
    draw_key(page, kind.color.c_str(), kind.name.c_str());
  }
  page.close().close();
  const int top = bars.limit > 0 ? 34 : 14;
  const int height =
      top + kRowHeight * static_cast<int>(bars.rows.size()) - kBelowBar;
  page.open(
      "svg", {{"width", "100%"},
              {"height", std::to_string(height)},
              {"role", "img"},
              {"aria-labelledby", bars.id + "-t " + bars.id + "-d"}});
  page.leaf("title", {{"id", bars.id + "-t"}}, bars.title);
  page.leaf("desc", {{"id", bars.id + "-d"}}, bars.description);
  int y = top;
  for (const auto& row : bars.rows) {
    draw_words(page, bars, row, y);
    draw_bar(page, row, whole, y);
    y += kRowHeight;
  }
  if (bars.limit > 0) draw_limits(page, bars, whole, top, height);
  page.close().close();
}

}  // namespace echelon
